// Rows of scores as torch holds them, in any of its dtypes, read as what is computed in.
#pragma once

#include "vector.h"

namespace tamis {

enum class Dtype : int32_t { kFloat = 0, kDouble = 1, kBfloat16 = 2, kHalf = 3 };

TAMIS_INLINE float widen(uint16_t bits, Dtype dtype) {
    if (dtype == Dtype::kBfloat16) return bit_cast<float>(uint32_t(bits) << 16);
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;
    uint32_t wide = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
    if ((bits & 0x7c00) == 0x7c00) wide |= 0x7f800000;  // an infinity or no number
    return bit_cast<float>(wide | uint32_t(bits & 0x8000) << 16);
}

template <class T>
struct Scores {
    const void* data;
    Dtype dtype;
    int64_t stride, width;  // from row to row, and of a row; within one, numbers lie side by side

    // Row number `row`, where it lies or, narrower than T, in `room`.
    const T* row(int64_t row, T* room) const {
        if (dtype == Dtype::kFloat || dtype == Dtype::kDouble) return static_cast<const T*>(data) + row * stride;
        const uint16_t* narrow = static_cast<const uint16_t*>(data) + row * stride;
        for (int64_t j = 0; j < width; j++) room[j] = T(widen(narrow[j], dtype));
        return room;
    }

    bool is_narrow() const { return dtype == Dtype::kBfloat16 || dtype == Dtype::kHalf; }
};

}  // namespace tamis
