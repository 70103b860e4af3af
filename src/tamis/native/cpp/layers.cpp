// Layers of encoders and decoders, and a whole encoder.
#include "layers.h"

namespace tamis {

namespace {

void normalise_row(const Norm& norm, const float* from, int64_t width, float* out) {
    constexpr int lanes = kLanes<float>;
    const auto some = [&](const float* x, int64_t j, float rest) {
        return width - j < lanes ? load_some(x + j, int(width - j), rest) : load(x + j);
    };
    float mean = 0;
    FloatVec total{};
    if (norm.kind == NormKind::kLayer) {
        for (int64_t j = 0; j < width; j += lanes) total += some(from, j, 0.0f);
        mean = sum<float>(total) / float(width);
        total = FloatVec{};
    }
    for (int64_t j = 0; j < width; j += lanes) {
        const FloatVec d = some(from, j, mean) - mean;
        total += d * d;
    }
    const float inverse = 1.0f / std::sqrt(sum<float>(total) / float(width) + norm.epsilon);
    for (int64_t j = 0; j < width; j += lanes) {
        FloatVec y = (some(from, j, 0.0f) - mean) * inverse;
        if (norm.weight) y *= some(norm.weight, j, 0.0f);
        if (norm.bias) y += some(norm.bias, j, 0.0f);
        if (width - j < lanes)
            store_some(out + j, y, int(width - j));
        else
            store(out + j, y);
    }
}

}  // namespace

void normalise(const Norm& norm, const float* x, int64_t rows, int64_t width, float* out) {
    need(in_parallel(rows, 1 + kGrain / width, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) normalise_row(norm, x + r * width, width, out + r * width);
    }));
}

void merge_heads(const Merge& merge, float* x, int64_t rows, int64_t width) {
    if (merge.norm.kind == NormKind::kNone) return;
    if (merge.norm.kind == NormKind::kLayer) return normalise(merge.norm, x, rows, width, x);
    need(in_parallel(rows, 1 + kGrain / (4 * width), [&](int64_t first, int64_t last) {
        thread_local Scratch<float> scratch;
        float* gates = scratch.take(width);
        for (int64_t r = first; r < last; r++) {
            float* row = x + r * width;
            if (std::all_of(row, row + width, [](float value) { return value == 0.0f; })) continue;
            if (merge.gate)
                for (int64_t j = 0; j < width; j += kLanes<float>) {
                    const int count = int(std::min<int64_t>(kLanes<float>, width - j));
                    const FloatVec t = load_some(row + j, count, 0.0f) * load_some(merge.gate + j, count, 0.0f);
                    store(gates + j, 1.0f / (exp(max(min(-t, all(87.0f)), all(-87.0f))) + 1.0f));
                }
            normalise_row(merge.norm, row, width, row);
            if (merge.gate)
                for (int64_t j = 0; j < width; j++) row[j] *= gates[j];
        }
    }));
}

void feed_forward(const Layer& layer, const Stack& stack, const float* input, int64_t rows, float* output, Buffers& buffers) {
    float* hidden = buffers.hidden.data();
    const bool gated = layer.gate.words != nullptr;
    need(product(layer.up, input, rows, gated ? Function::kNone : layer.function, hidden, buffers.room));
    if (gated) {
        float* gate = buffers.gate.data();
        need(product(layer.gate, input, rows, layer.function, gate, buffers.room));
        const int64_t count = rows * stack.ffn_dim;
        for (int64_t i = 0; i < count; i++) hidden[i] *= gate[i];
    }
    need(product(layer.down, hidden, rows, Function::kNone, output, buffers.room));
}

void project(const Attention& attention, const float* input, int64_t rows, float* out, const Stack& stack, ProductRoom& room) {
    const Matrix* parts[] = {&attention.query, &attention.key, &attention.value};
    const int64_t width = (stack.heads + 2 * stack.kv_heads) * stack.head_dim;
    need(product(parts, 3, input, stack.embed_dim, rows, Function::kNone, out, width, room));
}

void lay_out(const float* from, int64_t stride, int64_t apart, int64_t count, int64_t head_dim, float* keys, int64_t room,
             float* values) {
    const int64_t width = whole_vectors(head_dim);
    for (int64_t j = 0; j < count; j++) {
        const float* key = from + j * stride;
        for (int64_t d = 0; d < head_dim; d++) keys[d * room + j] = key[d];
        std::memcpy(values + j * width, key + apart, size_t(head_dim) * sizeof(float));
    }
}

namespace {

// Each sentence sees itself.
void attend_to_itself(const Attention& attention, const Stack& stack, const float* input, const int64_t* starts,
                      int64_t sentences, float* output, Buffers& buffers) {
    const int64_t rows = starts[sentences], heads = stack.heads, head_dim = stack.head_dim;
    const int64_t width = (heads + 2 * stack.kv_heads) * head_dim;
    project(attention, input, rows, buffers.projected.data(), stack, buffers.room);
    need(in_parallel(sentences * heads, 1, [&](int64_t first, int64_t last) {
        thread_local AttentionRoom room;
        thread_local Scratch<float> keys, values, places;
        for (int64_t item = first; item < last; item++) {
            const int64_t sentence = item / heads, head = item % heads, group = head / (heads / stack.kv_heads);
            const int64_t start = starts[sentence], count = starts[sentence + 1] - start;
            const int64_t places_wide = whole_vectors(count) + kLanes<float>;
            float* k = keys.take(head_dim * places_wide);
            float* v = values.take(count * whole_vectors(head_dim));
            std::fill(k, k + head_dim * places_wide, 0.0f);
            std::fill(v, v + count * whole_vectors(head_dim), 0.0f);
            const float* base = buffers.projected.data() + start * width;
            lay_out(base + (heads + group) * head_dim, width, stack.kv_heads * head_dim, count, head_dim, k, places_wide, v);
            const float slope = stack.slopes ? stack.slopes[head] : 0.0f;
            float* at = places.take(count);
            for (int64_t j = 0; j < count; j++) at[j] = float(j);
            attend(base + head * head_dim, width, count, head_dim, head, {k, v, places_wide, count, nullptr, 0, at},
                   attention.rule, slope, at, buffers.context.data() + start * heads * head_dim + head * head_dim,
                   heads * head_dim, room);
        }
    }));
    merge_heads(attention.merge, buffers.context.data(), rows, heads * head_dim);
    need(product(attention.output, buffers.context.data(), rows, Function::kNone, output, buffers.room));
}

}  // namespace

extern "C" {

// x (all tokens of all sentences, embed_dim), in place; starts (sentences + 1) is where each sentence begins.
TAMIS_PUBLIC int32_t tamis_encode(const Stack* stack, float* x, const int64_t* starts, int64_t sentences) {
    try {
        const int64_t rows = starts[sentences];
        Buffers buffers;
        buffers.take(*stack, rows);
        for (int64_t i = 0; i < stack->count; i++) {
            const Layer& layer = stack->layers[i];
            sublayer(layer.around_own, *stack, x, rows, buffers, [&](const float* input, float* output) {
                attend_to_itself(layer.own, *stack, input, starts, sentences, output, buffers);
            });
            sublayer(layer.around_feed, *stack, x, rows, buffers, [&](const float* input, float* output) {
                feed_forward(layer, *stack, input, rows, output, buffers);
            });
        }
        if (stack->last.kind != NormKind::kNone) normalise(stack->last, x, rows, stack->embed_dim, x);
        return kDone;
    } catch (const Failed& failed) {
        return failed.status;
    } catch (const std::exception&) {
        return kOutOfMemory;
    }
}

}  // extern "C"

}  // namespace tamis
