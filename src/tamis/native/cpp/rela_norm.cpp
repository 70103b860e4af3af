// The norm of ReLA and its gate, and their gradients, of rows of fp32:
//
//     y = gain z r sigmoid(gate z),   r = (mean z^2 + epsilon)^(-1/2)
//
// A null row, all zeros, gives zeros and passes no gradient.
#include <algorithm>
#include <memory>

#include "rows.h"

namespace tamis {
namespace {

// Rows are cut into so many parts, each with sums for gain and gate of its own, that are then added in order: by the shape
// alone, so that sums do not depend on threads.
constexpr int64_t kNormParts = 32;

struct RelaNorm {
    int64_t width;
    const float* gain;  // or null
    const float* gate;  // or null
    float epsilon;

    TAMIS_INLINE FloatVec some(const float* x, int64_t j, float rest) const {
        return width - j < kLanes<float> ? load_some(x + j, int(width - j), rest) : load(x + j);
    }
    TAMIS_INLINE void put(float* x, int64_t j, FloatVec y) const {
        width - j < kLanes<float> ? store_some(x + j, y, int(width - j)) : store(x + j, y);
    }
    TAMIS_INLINE FloatVec gain_at(int64_t j) const { return gain ? some(gain, j, 0.0f) : all(1.0f); }

    // Whether a row is not null, and what it is multiplied with.
    bool is_alive(const float* z, float& r) const {
        FloatVec squares{};
        FloatBits alive{};
        for (int64_t j = 0; j < width; j += kLanes<float>) {
            const FloatVec x = some(z, j, 0.0f);
            squares += x * x;
            alive |= x != 0.0f;  // no number is not 0
        }
        r = 1.0f / std::sqrt(sum<float>(squares) / float(width) + epsilon);
        return any(alive);
    }

    // How far the gate is open, and how far it is closed: what is left of 1 would have few digits.
    struct Gate {
        FloatVec open, closed;
    };
    TAMIS_INLINE Gate gate_at(FloatVec z, int64_t j) const {
        if (!gate) return {all(1.0f), FloatVec{}};
        const FloatVec t = z * some(gate, j, 0.0f);
        const FloatVec shut = exp(max(min(-t, all(87.0f)), all(-87.0f))), open = 1.0f / (shut + 1.0f);
        return {choose(t == t, choose(t < -87.0f, FloatVec{}, open), t), shut * open};
    }

    void forward(const float* z, float* y) const {
        float r;
        if (!is_alive(z, r)) return std::fill(y, y + width, 0.0f);
        for (int64_t j = 0; j < width; j += kLanes<float>) {
            const FloatVec x = some(z, j, 0.0f);
            put(y, j, x * r * gain_at(j) * gate_at(x, j).open);
        }
    }

    // `gates` has room for two rows of whole vectors.
    void backward(const float* z, const float* dy, float* dz, float* d_gain, float* d_gate, float* gates) const {
        float r;
        if (!is_alive(z, r)) return std::fill(dz, dz + width, 0.0f);
        FloatVec products{};
        for (int64_t j = 0; j < width; j += kLanes<float>) {
            const FloatVec x = some(z, j, 0.0f);
            const Gate here = gate_at(x, j);
            store(gates + 2 * j, here.open);
            store(gates + 2 * j + kLanes<float>, here.closed);
            products += some(dy, j, 0.0f) * gain_at(j) * here.open * x;
        }
        const float mean = sum<float>(products) / float(width) * r * r;
        for (int64_t j = 0; j < width; j += kLanes<float>) {
            const FloatVec x = some(z, j, 0.0f), open = load(gates + 2 * j), normal = x * r;
            const FloatVec weighed = some(dy, j, 0.0f) * open, scaled = weighed * gain_at(j);
            FloatVec change = (scaled - x * mean) * r;
            if (gate) {
                const FloatVec moved = scaled * normal * load(gates + 2 * j + kLanes<float>);
                change += moved * some(gate, j, 0.0f);
                put(d_gate, j, some(d_gate, j, 0.0f) + moved * x);
            }
            if (gain) put(d_gain, j, some(d_gain, j, 0.0f) + weighed * normal);
            put(dz, j, change);
        }
    }
};

}  // namespace

extern "C" {

TAMIS_PUBLIC int32_t tamis_rela_norm_forward(const float* z, int64_t rows, int64_t width, const float* gain,
                                             const float* gate, double epsilon, float* y) {
    const RelaNorm norm{width, gain, gate, float(epsilon)};
    return in_parallel(rows, 1 + kGrain / (4 * std::max<int64_t>(width, 1)), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) norm.forward(z + i * width, y + i * width);
    });
}

TAMIS_PUBLIC int32_t tamis_rela_norm_backward(const float* z, const float* dy, int64_t rows, int64_t width,
                                              const float* gain, const float* gate, double epsilon, float* dz,
                                              float* d_gain, float* d_gate) {
    const RelaNorm norm{width, gain, gate, float(epsilon)};
    const int64_t parts = std::clamp<int64_t>(rows, 1, kNormParts);
    std::unique_ptr<float[]> sums;
    try {
        sums.reset(new float[size_t(2 * parts * width)]());
    } catch (const std::exception&) {
        return kOutOfMemory;
    }
    const Status status = in_parallel(parts, 1, [&](int64_t first, int64_t last) {
        thread_local Scratch<float> gates;
        float* room = gates.take(2 * (width + kLanes<float>));
        for (int64_t part = first; part < last; part++) {
            float* own = sums.get() + 2 * part * width;
            for (int64_t i = rows * part / parts; i < rows * (part + 1) / parts; i++)
                norm.backward(z + i * width, dy + i * width, dz + i * width, own, own + width, room);
        }
    });
    if (status != kDone) return status;
    const auto add_up = [&](const float* from, float* to) {
        for (int64_t j = 0; to && j < width; j++) {
            double total = 0;
            for (int64_t part = 0; part < parts; part++) total += double(from[2 * part * width + j]);
            to[j] = float(total);
        }
    };
    add_up(sums.get(), d_gain);
    add_up(sums.get() + width, d_gate);
    return kDone;
}

}  // extern "C"

}  // namespace tamis
