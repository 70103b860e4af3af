// Products of a few rows with weights that were packed once, in fp32, bf16 or int8.
//
// Weights lie in panels of as many outputs as a tile has columns, so that a product reads each panel from one end to the
// other.  Everything is in words of 32 bits: a number of fp32, two of bf16 or four of int8, which belong to one output and to
// inputs that follow each other.  A tile multiplies one word of each row with one of each output, in all kinds alike.
//
// int8: weights are scaled per output and inputs per row, at each product, both to +-127; sums are exact.
#pragma once

#include <vector>

#include "elementary.h"
#include "threads.h"

namespace tamis {

enum class Precision : int32_t { kFloat = 0, kBfloat16 = 1, kInt8 = 2 };
enum class Function : int32_t { kNone = 0, kRelu = 1, kGelu = 2, kSilu = 3 };

// As src/tamis/native/product.py declares it.
struct Matrix {
    int64_t outputs, inputs;
    const int32_t* words;   // null: there is no such matrix
    const float* bias;      // or null
    const float* scales;    // of int8: per output
    const int32_t* sums;    // of int8: 128 times the sum of each output's weights
    Precision precision;
};

constexpr int kTileVectors = kBytes == 64 ? 4 : 2;
constexpr int kTileRows = 6;
constexpr int64_t kPanel = kTileVectors * kLanes<float>;

TAMIS_INLINE int64_t numbers_in_word(Precision precision) { return int64_t(1) << int(precision); }
TAMIS_INLINE int64_t words_of(Precision precision, int64_t inputs) {
    const int64_t numbers = numbers_in_word(precision);
    return (inputs + numbers - 1) / numbers;
}
inline int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

TAMIS_INLINE uint32_t to_bfloat16(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;  // no number
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// x / scale, rounded to the nearest integer from -127 to 127.
TAMIS_INLINE int32_t to_int8(float x, float inverse) {
    const float y = x * inverse;
    return y == y ? int32_t(std::nearbyint(y > 127.0f ? 127.0f : y < -127.0f ? -127.0f : y)) : 0;
}

// Rows of inputs as words.
struct Words {
    const int32_t* data;
    int64_t stride;
    const float* scales;  // of int8: per row
};

// Room that a product needs.
struct ProductRoom {
    std::vector<int32_t> words;
    std::vector<float> scales;
};

Words prepared(Precision precision, const float* x, int64_t stride, int64_t rows, int64_t inputs, ProductRoom& room);

// out (rows, all outputs) = function(x weights^T + bias), the outputs of several matrices of one kind side by side.
Status product(const Matrix* const* parts, int count, const float* x, int64_t stride, int64_t rows, Function function,
               float* out, int64_t out_stride, ProductRoom& room);

inline Status product(const Matrix& matrix, const float* x, int64_t rows, Function function, float* out, ProductRoom& room) {
    const Matrix* part = &matrix;
    return product(&part, 1, x, matrix.inputs, rows, function, out, matrix.outputs, room);
}

FloatVec apply(Function function, FloatVec x);

}  // namespace tamis
