// The kernels under the sanitizers, without Python: random and adversarial rows in memory that ends where they end.
//
// Each row of weights must add up to one or be one of the special ones, and each gradient to zero.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "rows.h"

extern "C" {
void tamis_use_threads_of(void*);
int32_t tamis_forward(const void*, tamis::Dtype, int64_t, int64_t, int64_t, const void*, int32_t, void*, void*);
int32_t tamis_backward(
    const void*, const void*, const void*, int64_t, int32_t, int64_t, int64_t, const void*, int32_t, void*, void*);
int32_t tamis_loss_forward(
    const void*, tamis::Dtype, int64_t, int64_t, int64_t, const void*, int32_t, const void*, const void*, int64_t, double,
    void*, void*, int32_t);
int32_t tamis_loss_backward(
    const void*, tamis::Dtype, int64_t, int64_t, int64_t, const void*, int32_t, const void*, const void*, int64_t, double,
    const void*, const void*, int64_t, void*, void*);
int32_t tamis_rela_norm_forward(const float*, int64_t, int64_t, const float*, const float*, double, float*);
int32_t tamis_rela_norm_backward(
    const float*, const float*, int64_t, int64_t, const float*, const float*, double, float*, float*, float*);
}

namespace {

std::mt19937 generator(0);

int pick(int count) { return std::uniform_int_distribution<int>(0, count - 1)(generator); }
double normal() { return std::normal_distribution<double>()(generator); }

void expect(bool right, const char* what) {
    if (right) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

// In two parts, so that blocks begin in odd places.
int32_t in_two(int64_t begin, int64_t end, int64_t, void (*work)(int64_t, int64_t, void*), void* context) {
    const int64_t middle = begin + (end - begin) / 3;
    if (middle > begin) work(begin, middle, context);
    if (end > middle) work(middle, end, context);
    return 0;
}

double score(int kind, int64_t j, int64_t n) {
    switch (kind) {
        case 0: return normal();
        case 1: return 100 * normal();
        case 2: return 1e-3 * normal();
        case 3: return 0;                                      // ties
        case 4: return j == n / 2 ? 1e30 : normal();           // one far above
        case 5: return -1e-6 * double(j);                      // near-ties
        case 6: return j % 3 ? -INFINITY : normal();           // hidden ones
        case 7: return -INFINITY;
        case 8: return j == n - 1 ? INFINITY : normal();
        case 9: return j == n - 1 ? NAN : normal();
        case 10: return std::pow(10.0, -40 + 42.0 * double(j) / double(n));  // denormals
        default: return 3e38 * (j % 2 ? 1 : -1);
    }
}
constexpr int kKinds = 12;

uint16_t narrowed(double x, tamis::Dtype dtype) {
    const uint32_t bits = tamis::bit_cast<uint32_t>(float(x));
    if (dtype == tamis::Dtype::kBfloat16) return uint16_t(std::isnan(x) ? 0x7fc0 : bits >> 16);
    if (std::isnan(x)) return 0x7e00;
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    const int power = int(bits >> 23 & 0xff) - 112;
    if (power >= 31) return uint16_t(sign | 0x7c00);
    return power <= 0 ? uint16_t(sign | (bits >> 14 & 1)) : uint16_t(sign | power << 10 | (bits >> 13 & 0x3ff));
}

template <class T>
void round(tamis::Dtype dtype) {
    const bool is_narrow = dtype == tamis::Dtype::kBfloat16 || dtype == tamis::Dtype::kHalf;
    const int64_t widths[] = {1, 2, 3, 7, 15, 16, 17, 32, 63, 64, 100, 127, 128, 129, 200, 513, 1000, 4096, 4097, 5001};
    const int64_t n = widths[pick(20)], rows = 1 + pick(n > 1000 ? 5 : 40), stride = n + (pick(2) ? 3 : 0);
    const bool shared = pick(2) == 0;
    const double special[] = {0, 0.5, 1, 0.3, 0.1, 1e-6, 0.125, 0.75};

    std::vector<T> wide(size_t((rows - 1) * stride + n)), e(size_t(shared ? 1 : rows));
    std::vector<int> kinds(static_cast<size_t>(rows));
    for (auto& x : e) x = T(pick(2) ? special[pick(8)] : std::abs(std::fmod(normal(), 1.0)));
    for (int64_t r = 0; r < rows; r++) {
        kinds[size_t(r)] = pick(kKinds);
        for (int64_t j = 0; j < n; j++) wide[size_t(r * stride + j)] = T(score(kinds[size_t(r)], j, n));
    }
    std::vector<uint16_t> narrow(is_narrow ? wide.size() : 0);
    for (size_t i = 0; i < narrow.size(); i++) narrow[i] = narrowed(wide[i], dtype);
    const void* z = is_narrow ? static_cast<const void*>(narrow.data()) : wide.data();

    const size_t size = size_t(rows * n);
    std::vector<T> p(size, NAN), floor(size_t(rows), NAN), g(size), dz(size, NAN), de(size_t(rows), NAN);
    for (auto& x : g) x = T(normal());
    expect(tamis_forward(z, dtype, stride, rows, n, e.data(), shared, p.data(), floor.data()) == 0, "forward");
    expect(tamis_backward(p.data(), floor.data(), g.data(), n, sizeof(T) == 8, rows, n, e.data(), shared, dz.data(),
                          pick(2) ? de.data() : nullptr) == 0, "backward");
    for (int64_t r = 0; r < rows; r++) {
        double mass = 0, drift = 0, size_of_drift = 0;
        for (int64_t j = 0; j < n; j++) {
            mass += double(p[size_t(r * n + j)]);
            drift += double(dz[size_t(r * n + j)]);
            size_of_drift += std::abs(double(dz[size_t(r * n + j)]));
        }
        const int kind = kinds[size_t(r)];
        if (kind == 9) {
            expect(std::isnan(mass), "no number must show");
            continue;
        }
        const bool is_empty = kind == 7 || (kind == 11 && n == 1 && dtype == tamis::Dtype::kHalf);  // -3e38 is -inf there
        expect(std::abs(mass - (is_empty ? 0 : 1)) < 1e-5, "mass");
        expect(std::abs(drift) <= 1e-4 * size_of_drift + 1e-5, "gradients add up to 0");
    }

    std::vector<int64_t> target(static_cast<size_t>(rows));
    std::vector<T> weight(static_cast<size_t>(n)), values(size_t(rows), NAN), kept(size_t(7 * rows), NAN), many(size_t(rows), 1);
    for (auto& t : target) t = pick(5) ? pick(int(n)) : -100;
    for (auto& w : weight) w = T(std::abs(normal()));
    const void* classes = pick(4) ? target.data() : nullptr;
    const void* weights = pick(2) ? weight.data() : nullptr;
    const double smoothing = pick(2) ? 0.1 : 0;
    expect(tamis_loss_forward(z, dtype, stride, rows, n, e.data(), shared, classes, weights, -100, smoothing, values.data(),
                              kept.data(), 1) == 0, "loss");
    expect(tamis_loss_backward(z, dtype, stride, rows, n, e.data(), shared, classes, weights, -100, smoothing, kept.data(),
                               many.data(), 1, dz.data(), de.data()) == 0, "gradient of the loss");
    target[0] = n;  // beyond the last class
    expect(tamis_loss_forward(z, dtype, stride, rows, n, e.data(), shared, target.data(), weights, -100, smoothing,
                              values.data(), kept.data(), 1) == tamis::kBadTarget, "a bad target must be refused");
}

void norm() {
    const int64_t rows = pick(40), width = 1 + pick(70);
    std::vector<float> z(size_t(rows * width)), dy(z.size()), y(z.size(), NAN), dz(z.size(), NAN);
    std::vector<float> gain(size_t(width), 2), gate(gain), d_gain(gain.size(), NAN), d_gate(gain.size(), NAN);
    for (auto& x : z) x = float(std::max(normal(), 0.0));
    for (auto& x : dy) x = float(normal());
    const float* some_gain = pick(2) ? gain.data() : nullptr;
    const float* some_gate = pick(2) ? gate.data() : nullptr;
    expect(tamis_rela_norm_forward(z.data(), rows, width, some_gain, some_gate, 1e-8, y.data()) == 0, "norm");
    expect(tamis_rela_norm_backward(z.data(), dy.data(), rows, width, some_gain, some_gate, 1e-8, dz.data(),
                                    some_gain ? d_gain.data() : nullptr, some_gate ? d_gate.data() : nullptr) == 0,
           "gradients of the norm");
    for (const auto* written : {&y, &dz})
        for (float x : *written) expect(std::isfinite(x), "the norm of numbers is a number");
}

}  // namespace

int main(int count, char** arguments) {
    tamis_use_threads_of(reinterpret_cast<void*>(in_two));
    const int calls = count > 1 ? std::atoi(arguments[1]) : 500;
    for (int i = 0; i < calls; i++) {
        round<float>(tamis::Dtype::kFloat);
        round<double>(tamis::Dtype::kDouble);
        round<float>(tamis::Dtype::kBfloat16);
        round<float>(tamis::Dtype::kHalf);
        norm();
    }
    std::printf("%d rounds of each dtype: no fault\n", calls);
}
