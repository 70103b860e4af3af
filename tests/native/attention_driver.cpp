// Attention's kernels under the sanitizers, without Python: random calls in memory that ends where tensors end.
//
//     c++ -std=c++17 -O1 -g -march=native -fsanitize=address,undefined attention_driver.cpp ../../src/tamis/native/cpp/*.cpp
//         -I ../../src/tamis/native/cpp -o driver && ./driver 300
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "attention.h"

extern "C" {
void tamis_use_threads_of(void*);
int32_t tamis_attention_forward(const tamis::Attention*);
int32_t tamis_attention_backward(const tamis::Attention*);
}

namespace {

std::mt19937 generator(0);

int pick(int count) { return std::uniform_int_distribution<int>(0, count - 1)(generator); }
float normal() { return std::normal_distribution<float>()(generator); }

int32_t in_two(int64_t begin, int64_t end, int64_t, void (*work)(int64_t, int64_t, void*), void* context) {
    const int64_t middle = begin + (end - begin) / 3;
    if (middle > begin) work(begin, middle, context);
    if (end > middle) work(middle, end, context);
    return 0;
}

// Exactly as much memory as the tensor needs.
struct Room {
    std::vector<std::unique_ptr<float[]>> pieces;

    tamis::Tensor tensor(int64_t b, int64_t h, int64_t n, int64_t d, bool random) {
        const size_t count = size_t(b * h * n * d);
        pieces.emplace_back(new float[count]);
        for (size_t i = 0; i < count; i++) pieces.back()[i] = random ? normal() : NAN;
        return {pieces.back().get(), h * n * d, n * d, d};
    }
};

void expect(bool right, const char* what) {
    if (right) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

void round() {
    constexpr int lengths[] = {1, 2, 15, 16, 17, 47, 64, 65, 130, 257};
    tamis::Attention call{};
    Room room;
    call.batches = 1 + pick(2), call.key_heads = 1 + pick(2), call.heads = call.key_heads * (1 + pick(2));
    call.queries = lengths[pick(10)], call.keys = lengths[pick(10)];
    call.dim = 16 * (1 + pick(5)), call.value_dim = 16 * (1 + pick(5));
    call.key_step = 1, call.scale = pick(3) ? 0.3 : 3.0;
    call.rule = tamis::RuleName(pick(4)), call.slope = 0.01;
    const int64_t rows = call.batches * call.heads * call.queries;
    call.query = room.tensor(call.batches, call.heads, call.queries, call.dim, true);
    call.key = room.tensor(call.batches, call.key_heads, call.keys, call.dim, true);
    call.value = room.tensor(call.batches, call.key_heads, call.keys, call.value_dim, true);
    call.grad = room.tensor(call.batches, call.heads, call.queries, call.value_dim, true);
    call.out = room.tensor(call.batches, call.heads, call.queries, call.value_dim, false);
    call.d_query = room.tensor(call.batches, call.heads, call.queries, call.dim, false);
    call.d_key = room.tensor(call.batches, call.key_heads, call.keys, call.dim, false);
    call.d_value = room.tensor(call.batches, call.key_heads, call.keys, call.value_dim, false);
    call.e = room.tensor(call.batches, call.heads, call.queries, 1, false);
    constexpr float powers[] = {0, 0.05f, 0.3f, 0.5f, 0.8f, 1};
    const float power = powers[pick(6)];
    for (int64_t i = 0; i < rows; i++) call.e.data[i] = pick(20) ? power : powers[pick(6)];
    std::vector<uint8_t> seen(size_t(call.queries * call.keys));
    std::vector<float> biases(seen.size());
    if (pick(3) == 0) {
        for (uint8_t& one : seen) one = uint8_t(pick(4) > 0);
        for (float& one : biases) one = pick(4) ? normal() : -INFINITY;
        const bool adds = pick(2);
        call.mask = adds ? static_cast<const void*>(biases.data()) : seen.data();
        call.mask_kind = adds ? tamis::kAdditive : tamis::kBoolean, call.mask_row = call.keys, call.mask_key = 1;
    }
    std::vector<int64_t> bounds[2], lengths_of(size_t(call.batches)), positions[2];
    if (pick(4) == 0) {
        for (int64_t& one : lengths_of) one = pick(int(call.keys) + 1);
        call.lengths = lengths_of.data();
    } else if (pick(4) == 0) {  // also bounds beyond the last key
        bounds[0] = {0, pick(int(call.queries) + 1), call.queries};
        bounds[1] = {0, pick(int(call.keys) + 1), pick(2) ? call.keys : call.keys + 1000};
        call.cu_queries = bounds[0].data(), call.cu_keys = bounds[1].data(), call.segments = 2;
    }
    if (pick(4) == 0) {
        for (int64_t i = 0; i < call.queries; i++) positions[0].push_back(pick(300));
        for (int64_t i = 0; i < call.keys; i++) positions[1].push_back(pick(300));
        call.query_positions = positions[0].data();
        if (pick(2)) call.key_positions = positions[1].data();
    }
    std::vector<float> slopes(size_t(call.heads), 0.2f);
    if (pick(3) == 0) call.slopes = slopes.data(), call.slopes_head = 1;
    call.left = pick(3) ? -1 : pick(30), call.right = pick(2) ? -1 : pick(2) ? 0 : pick(20);
    if (pick(4) == 0) call.dropout = 0.3, call.seed = generator();
    if (pick(8) == 0) call.key.data[pick(int(call.keys * call.dim))] = pick(2) ? NAN : INFINITY;

    const int64_t most = rows * call.keys;
    std::vector<int32_t> kept(size_t(pick(3) ? most : pick(int(most) + 1)));
    std::vector<int64_t> places(static_cast<size_t>(rows));
    std::vector<int32_t> counts(static_cast<size_t>(rows));
    std::vector<float> statistics(size_t(3 * rows)), d_e(static_cast<size_t>(rows)), d_slopes(static_cast<size_t>(rows));
    call.kept = kept.data(), call.capacity = int64_t(kept.size());
    call.places = places.data(), call.counts = counts.data();
    call.statistics = statistics.data();
    if (call.rule == tamis::kEntmax) call.d_e = d_e.data();
    if (call.slopes) call.d_slopes = d_slopes.data();
    expect(tamis_attention_forward(&call) == 0, "forward failed");
    expect(tamis_attention_backward(&call) == 0, "backward failed");
    bool finite = true;
    for (int64_t i = 0; i < call.batches * call.key_heads * call.keys * call.dim; i++)
        finite = finite && std::isfinite(call.key.data[i]);
    for (int64_t i = 0; finite && i < rows * call.value_dim; i++)
        expect(std::isfinite(call.out.data[i]), "an output is not finite");
    for (int64_t i = 0; finite && i < rows * call.dim; i++)
        expect(std::isfinite(call.d_query.data[i]), "a gradient is not finite");
}

// From pages, of which those beyond the length of a sequence are not there.
void round_of_pages() {
    constexpr int64_t pages = 4, pool = 3;
    tamis::Attention call{};
    Room room;
    call.batches = 1 + pick(2), call.key_heads = 1 + pick(2), call.heads = call.key_heads * (1 + pick(2));
    call.page = 16 * (1 + pick(2)), call.pages_batch = pages, call.keys = pages * call.page;
    call.queries = 1 + pick(7), call.dim = call.value_dim = 16 * (1 + pick(4));
    call.key_step = 1, call.scale = 0.3, call.rule = tamis::RuleName(pick(4)), call.slope = 0.01;
    call.left = pick(2) ? -1 : pick(30), call.right = 0;
    call.query = room.tensor(call.batches, call.heads, call.queries, call.dim, true);
    call.key = room.tensor(pool, call.key_heads, call.page, call.dim, true);
    call.value = room.tensor(pool, call.key_heads, call.page, call.dim, true);
    call.out = room.tensor(call.batches, call.heads, call.queries, call.dim, false);
    float e = 0.5;
    if (call.rule == tamis::kEntmax) call.e = {&e, 0, 0, 0};
    std::vector<float> slopes(size_t(call.heads), 0.2f);
    if (pick(2)) call.slopes = slopes.data(), call.slopes_head = 1;
    std::vector<int32_t> table(size_t(call.batches * pages), INT32_MAX);
    std::vector<int64_t> lengths(static_cast<size_t>(call.batches));
    for (int64_t b = 0; b < call.batches; b++) {
        lengths[size_t(b)] = call.queries + pick(int(call.keys - call.queries) + 1);
        for (int64_t i = 0; i * call.page < lengths[size_t(b)]; i++) table[size_t(b * pages + i)] = pick(pool);
    }
    call.pages = table.data(), call.lengths = lengths.data();
    expect(tamis_attention_forward(&call) == 0, "forward from pages failed");
    for (int64_t i = 0; i < call.batches * call.heads * call.queries * call.dim; i++)
        expect(std::isfinite(call.out.data[i]), "an output from pages is not finite");
}

}  // namespace

int main(int count, char** arguments) {
    tamis_use_threads_of(reinterpret_cast<void*>(in_two));
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 100;
    for (int i = 0; i < rounds; i++) round(), round_of_pages();
    std::printf("%d rounds of attention\n", rounds);
}
