// Packing of weights, and products with them.
#include "product.h"

#include <algorithm>

#include "rows.h"

namespace tamis {
namespace {


// ---- tiles: up to kTileRows rows of inputs times a panel

using Tiles = void (*)(int rows, const Words& words, const int32_t* panel, int64_t count, float* out);

// What one word of inputs (x, the same in all lanes) and words of weights add to sums.  Macros, because a function for
// instructions that a file is not compiled for cannot be inlined into a template that does not name them.
#define MULTIPLY_FLOAT(sum, x, w) sum += bit_cast<FloatVec>(x) * bit_cast<FloatVec>(w)
#define MULTIPLY_BFLOAT16(sum, x, w)                                                            \
    sum += bit_cast<FloatVec>(x << 16) * bit_cast<FloatVec>(w << 16);                           \
    sum += bit_cast<FloatVec>(x & int32_t(0xffff0000)) * bit_cast<FloatVec>(w & int32_t(0xffff0000))
#define MULTIPLY_INT8(sum, x, w)                                                                \
    sum += ((x << 24) >> 24) * ((w << 24) >> 24) + ((x << 16) >> 24) * ((w << 16) >> 24) +      \
           ((x << 8) >> 24) * ((w << 8) >> 24) + (x >> 24) * (w >> 24)

#define TILES(NAME, TARGET, SUM, MULTIPLY)                                                      \
    template <int Rows>                                                                         \
    TARGET void NAME##_of(const Words& words, const int32_t* panel, int64_t count, float* out) { \
        SUM sums[Rows][kTileVectors] = {};                                                      \
        for (int64_t k = 0; k < count; k++) {                                                   \
            FloatBits w[kTileVectors];                                                          \
            for (int v = 0; v < kTileVectors; v++) std::memcpy(&w[v], panel + k * kPanel + v * kLanes<float>, kBytes); \
            for (int r = 0; r < Rows; r++) {                                                    \
                int32_t word;                                                                   \
                std::memcpy(&word, words.data + r * words.stride + k, sizeof word);             \
                const FloatBits x = FloatBits{} + word;                                         \
                for (int v = 0; v < kTileVectors; v++) { MULTIPLY(sums[r][v], x, w[v]); }       \
            }                                                                                   \
        }                                                                                       \
        std::memcpy(out, sums, sizeof sums);                                                    \
    }                                                                                           \
    void NAME(int rows, const Words& words, const int32_t* panel, int64_t count, float* out) {  \
        switch (rows) {                                                                         \
            case 1: return NAME##_of<1>(words, panel, count, out);                              \
            case 2: return NAME##_of<2>(words, panel, count, out);                              \
            case 3: return NAME##_of<3>(words, panel, count, out);                              \
            case 4: return NAME##_of<4>(words, panel, count, out);                              \
            case 5: return NAME##_of<5>(words, panel, count, out);                              \
            default: return NAME##_of<6>(words, panel, count, out);                             \
        }                                                                                       \
    }

TILES(float_tiles, , FloatVec, MULTIPLY_FLOAT)
TILES(bfloat16_tiles, , FloatVec, MULTIPLY_BFLOAT16)

#if defined(__AVX512F__)
#define MULTIPLY_VNNI(sum, x, w)                                                                \
    sum = bit_cast<FloatBits>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(x), bit_cast<__m512i>(w)))
#define MULTIPLY_BF16(sum, x, w)                                                                \
    sum = bit_cast<FloatVec>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(w), bit_cast<__m512bh>(x)))
// Products of bytes fit into 16 bits, two of them too, because none is -128.
#define MULTIPLY_INT8_WIDE(sum, x, w)                                                           \
    {                                                                                           \
        const __m512i value = bit_cast<__m512i>(x), weight = bit_cast<__m512i>(w);              \
        const __m512i turned = _mm512_mask_sub_epi8(weight, _mm512_movepi8_mask(value), _mm512_setzero_si512(), weight); \
        const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(value), turned);             \
        sum += bit_cast<FloatBits>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));             \
    }
TILES(vnni_tiles, __attribute__((target("avx512vnni"))), FloatBits, MULTIPLY_VNNI)
TILES(bf16_tiles, __attribute__((target("avx512bf16"))), FloatVec, MULTIPLY_BF16)
TILES(int8_tiles, , FloatBits, MULTIPLY_INT8_WIDE)
#elif defined(__AVX2__)
#define MULTIPLY_INT8_WIDE(sum, x, w)                                                           \
    {                                                                                           \
        const __m256i value = bit_cast<__m256i>(x), weight = bit_cast<__m256i>(w);              \
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(weight, value)); \
        sum += bit_cast<FloatBits>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));             \
    }
TILES(int8_tiles, , FloatBits, MULTIPLY_INT8_WIDE)
#else
TILES(int8_tiles, , FloatBits, MULTIPLY_INT8)
#endif

bool has_vnni() {
#if defined(__AVX512F__)
    static const bool found = __builtin_cpu_supports("avx512vnni");
    return found;
#else
    return false;
#endif
}

bool has_bf16() {
#if defined(__AVX512F__)
    static const bool found = __builtin_cpu_supports("avx512bf16");
    return found;
#else
    return false;
#endif
}

// The instruction takes bytes of inputs without a sign: they have 128 added, which `sums` takes away again.
int32_t offset_of_inputs() { return has_vnni() ? 128 : 0; }

Tiles tiles_of(Precision precision) {
    switch (precision) {
        case Precision::kFloat: return float_tiles;
#if defined(__AVX512F__)
        case Precision::kBfloat16: return has_bf16() ? bf16_tiles : bfloat16_tiles;
        default: return has_vnni() ? vnni_tiles : int8_tiles;
#else
        case Precision::kBfloat16: return bfloat16_tiles;
        default: return int8_tiles;
#endif
    }
}

// ---- inputs as words

// Of fp32 (inputs) to int8, in whole words; returns the scale.
float quantized(const float* x, int64_t inputs, int32_t offset, int8_t* out) {
    FloatVec most{}, strange{};
    int64_t j = 0;
    for (; j + kLanes<float> <= inputs; j += kLanes<float>) {
        const FloatVec at = load(x + j);
        most = max(at, max(-at, most));
        strange += at * 0.0f;
    }
    float largest = tamis::largest<float>(most), bad = sum<float>(strange);
    for (; j < inputs; j++) {
        largest = std::max(largest, std::fabs(x[j]));
        bad += x[j] * 0.0f;
    }
    const float inverse = largest > 0 && bad == 0 ? 127.0f / largest : 0.0f;
    for (j = 0; j + kLanes<float> <= inputs; j += kLanes<float>) {
        // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
        const FloatBits rounded = bit_cast<FloatBits>(min(max(load(x + j) * inverse, all(-127.0f)), all(127.0f)) + kRound);
        const FloatBits bytes = rounded + (offset - bit_cast<int32_t>(kRound));
        for (int i = 0; i < kLanes<float>; i++) out[j + i] = int8_t(bytes[i]);
    }
    for (; j < inputs; j++) out[j] = int8_t(to_int8(bad == 0 ? x[j] : 0.0f, inverse) + offset);
    return largest / 127.0f + bad;  // infinities and what is no number spoil the row, as they would in fp32
}

}  // namespace

Words prepared(Precision precision, const float* x, int64_t stride, int64_t rows, int64_t inputs, ProductRoom& room) {
    if (precision == Precision::kFloat) return {reinterpret_cast<const int32_t*>(x), stride, nullptr};
    const int64_t count = words_of(precision, inputs);
    room.words.resize(size_t(rows * count));
    room.scales.resize(size_t(rows));
    int32_t* const words = room.words.data();
    const int32_t offset = offset_of_inputs();
    const Status status = in_parallel(rows, 1 + 65536 / inputs, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            const float* from = x + r * stride;
            int32_t* to = words + r * count;
            to[count - 1] = 0;
            if (precision == Precision::kInt8) {
                room.scales[r] = quantized(from, inputs, offset, reinterpret_cast<int8_t*>(to));
                continue;
            }
            for (int64_t j = 0; j < inputs; j++) {
                const uint16_t half = uint16_t(to_bfloat16(from[j]));
                std::memcpy(reinterpret_cast<char*>(to) + 2 * j, &half, sizeof half);
            }
        }
    });
    if (status != kDone) throw std::runtime_error("no threads");
    return {words, count, room.scales.data()};
}

// (erf by Abramowitz and Stegun 7.1.26, to 1.5e-7)
FloatVec apply(Function function, FloatVec x) {
    const auto magnitude = [](FloatVec y) { return max(y, -y); };
    switch (function) {
        case Function::kRelu: return choose(x < 0.0f, FloatVec{}, x);  // what is no number stays one
        case Function::kSilu: return x / (exp(min(-x, all(87.0f))) + 1.0f) + x * 0.0f;
        case Function::kGelu: {
            const FloatVec u = magnitude(x) * 0.70710678f, t = 1.0f / (u * 0.3275911f + 1.0f);
            FloatVec y = all(1.061405429f);
            for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) y = y * t + c;
            const FloatVec tail = y * t * exp(max(u * -u, all(-87.0f)));  // 1 - erf(u)
            return x * choose(x < 0.0f, tail * 0.5f, 1.0f - tail * 0.5f) + x * 0.0f;
        }
        default: return x;
    }
}

namespace {


// Sums of a tile as numbers of fp32, with bias and function, to where they belong.
void finish(const Matrix& matrix, int64_t panel, const float* tile, int rows, const float* scales, Function function,
            float* out, int64_t stride) {
    const int64_t begin = panel * kPanel;
    for (int64_t v = 0; v < kPanel && begin + v < matrix.outputs; v += kLanes<float>) {
        const int64_t at = begin + v;
        const int count = int(std::min<int64_t>(kLanes<float>, matrix.outputs - at));
        const FloatVec bias = matrix.bias ? load_some(matrix.bias + at, count, 0.0f) : FloatVec{};
        FloatBits sums{};
        FloatVec scale{};
        if (matrix.precision == Precision::kInt8) {
            scale = load_some(matrix.scales + at, count, 0.0f);
            if (offset_of_inputs()) std::memcpy(&sums, matrix.sums + at, size_t(count) * sizeof(float));
        }
        for (int r = 0; r < rows; r++) {
            FloatVec x = load(tile + r * kPanel + v);
            if (matrix.precision == Precision::kInt8)
                x = __builtin_convertvector(bit_cast<FloatBits>(x) - sums, FloatVec) * (scale * scales[r]);
            x += bias;
            if (function != Function::kNone) x = apply(function, x);
            if (count == kLanes<float>)
                store(out + r * stride + at, x);
            else
                store_some(out + r * stride + at, x, count);
        }
    }
}

}  // namespace

// Cycles of work that a thread takes at least.
constexpr int64_t kWorthAThread = 16000;

// Rows that a thread multiplies with a panel before another may take the rest.
constexpr int64_t kMostRows = 16 * kTileRows;

Status product(const Matrix* const* parts, int count, const float* x, int64_t stride, int64_t rows, Function function,
               float* out, int64_t out_stride, ProductRoom& room) {
    if (rows == 0) return kDone;
    const Matrix& first_part = *parts[0];
    const Precision precision = first_part.precision;
    const Words words = prepared(precision, x, stride, rows, first_part.inputs, room);
    const Tiles tiles = tiles_of(precision);
    const int64_t depth = words_of(precision, first_part.inputs);
    int64_t panels = 0;
    for (int i = 0; i < count; i++) panels += panels_of(parts[i]->outputs);
    // Many rows are cut up, for where there are more threads than panels.
    const int64_t chunks = (rows + kMostRows - 1) / kMostRows;
    const int64_t chunk = ((rows + chunks - 1) / chunks + kTileRows - 1) / kTileRows * kTileRows;
    // In cycles, about: a word comes from memory, and a vector of words is multiplied with each row.
    const int64_t cost = depth * kPanel / 2 + depth * kPanel * chunk / 32;
    const int64_t grain = 1 + kWorthAThread / (cost + 1);
    return in_parallel(panels * chunks, grain, [&](int64_t first, int64_t last) {
        alignas(64) float tile[kTileRows * kPanel];
        for (int64_t item = first; item < last; item++) {
            const int64_t begin = item % chunks * chunk, end = std::min(rows, begin + chunk);
            int64_t panel = item / chunks, column = 0;
            int which = 0;
            for (; panel >= panels_of(parts[which]->outputs); which++) {
                panel -= panels_of(parts[which]->outputs);
                column += parts[which]->outputs;
            }
            const Matrix& matrix = *parts[which];
            const int32_t* weights = matrix.words + panel * kPanel * depth;
            for (int64_t r = begin; r < end; r += kTileRows) {
                const int here = int(std::min<int64_t>(kTileRows, end - r));
                tiles(here, {words.data + r * words.stride, words.stride, nullptr}, weights, depth, tile);
                finish(matrix, panel, tile, here, words.scales ? words.scales + r : nullptr, function,
                       out + r * out_stride + column, out_stride);
            }
        }
    });
}

extern "C" {

TAMIS_PUBLIC int64_t tamis_packed_words(Precision precision, int64_t outputs, int64_t inputs) {
    return panels_of(outputs) * kPanel * words_of(precision, inputs);
}

// weights (outputs, inputs), rows at `stride`, to words; of int8 also scales and sums.
TAMIS_PUBLIC int32_t tamis_pack(Precision precision, const float* weights, int64_t stride, int64_t outputs, int64_t inputs,
                                int32_t* words, float* scales, int32_t* sums) {
    const int64_t depth = words_of(precision, inputs), numbers = numbers_in_word(precision);
    return in_parallel(panels_of(outputs), 1, [&](int64_t first, int64_t last) {
        for (int64_t n = first * kPanel; n < last * kPanel; n++) {
            int32_t* to = words + n / kPanel * kPanel * depth + n % kPanel;
            if (n >= outputs) {
                for (int64_t k = 0; k < depth; k++) to[k * kPanel] = 0;
                continue;
            }
            const float* from = weights + n * stride;
            float inverse = 0;
            if (precision == Precision::kInt8) {
                float most = 0, bad = 0;
                for (int64_t k = 0; k < inputs; k++) most = std::max(most, std::fabs(from[k])), bad += from[k] * 0.0f;
                scales[n] = most / 127.0f + bad;  // what is not finite spoils its output, as it would in fp32
                inverse = most > 0 && bad == 0 ? 127.0f / most : 0.0f;
            }
            int64_t total = 0;
            for (int64_t k = 0; k < depth; k++) {
                uint32_t word = 0;
                for (int64_t i = 0; i < numbers && k * numbers + i < inputs; i++) {
                    const float x = from[k * numbers + i];
                    if (precision == Precision::kFloat) word = bit_cast<uint32_t>(x);
                    if (precision == Precision::kBfloat16) word |= to_bfloat16(x) << 16 * i;
                    if (precision == Precision::kInt8) {
                        const int32_t q = to_int8(x, inverse);
                        total += q;
                        word |= uint32_t(q & 0xff) << 8 * i;
                    }
                }
                to[k * kPanel] = int32_t(word);
            }
            if (precision == Precision::kInt8) sums[n] = int32_t(128 * total);
        }
    });
}

// out (rows, outputs) = function(x (rows, inputs) weights^T + bias)
TAMIS_PUBLIC int32_t tamis_product(const Matrix* matrix, const float* x, int64_t rows, Function function, float* out) {
    try {
        ProductRoom room;
        return product(*matrix, x, rows, function, out, room);
    } catch (const std::exception&) {
        return kOutOfMemory;
    }
}

// 2 where the processor has instructions for products in this precision, 0 where they are spelled out.
TAMIS_PUBLIC int32_t tamis_has_instructions(Precision precision) {
    return precision == Precision::kInt8 ? has_vnni() : precision == Precision::kBfloat16 ? has_bf16() : 1;
}

// A number that goes with values taken here and there from pieces of memory, each of so many bytes.
TAMIS_PUBLIC int64_t tamis_sample(const int64_t* pieces, const int64_t* bytes, int64_t count) {
    constexpr int64_t kSamples = 64;
    uint64_t found = 14695981039346656037u;
    for (int64_t i = 0; i < count; i++) {
        const int64_t words = bytes[i] / 4, step = std::max<int64_t>(1, words / kSamples);
        for (int64_t j = 0; j < words; j += step) {
            uint32_t word;
            std::memcpy(&word, reinterpret_cast<const char*>(pieces[i]) + 4 * j, sizeof word);
            found = (found ^ word) * 1099511628211u;
        }
    }
    return int64_t(found);
}

}  // extern "C"

}  // namespace tamis
