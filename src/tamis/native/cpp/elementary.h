// Powers and logarithms of vectors, to about an ulp.
//
// fp32: polynomials of least error, in base 2, where whole powers are shifts of the exponent.  fp64: the C library, lane
// by lane; it is there to be exact.
#pragma once

#include "vector.h"

namespace tamis {

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

// 1.5 * 2^23: what is added to it is rounded to an integer.
constexpr float kRound = 12582912.0f;

// 2^(k + r) for r in [-1/2, 1/2] and shifted = kRound + k.
TAMIS_INLINE FloatVec power_of_two(FloatVec shifted, FloatVec r) {
    FloatVec y = all(1.5353366e-4f);
    y = y * r + 1.3398874e-3f;
    y = y * r + 9.618437e-3f;
    y = y * r + 5.5503324e-2f;
    y = y * r + 2.4022648e-1f;
    y = y * r + 6.931472e-1f;
    y = y * r + 1.0f;
    return bit_cast<FloatVec>(bit_cast<FloatBits>(y) + (bit_cast<FloatBits>(shifted) << 23));
}

// 2^x for x from -126 to 127.
TAMIS_INLINE FloatVec exp2_normal(FloatVec x) {
    const FloatVec shifted = x + kRound;
    return power_of_two(shifted, x - (shifted - kRound));
}

// 2^x; 0 below -126.  x is at most 127.
TAMIS_INLINE FloatVec exp2(FloatVec x) { return choose(x >= -126.0f, exp2_normal(x), FloatVec{}); }

// e^x; 0 below -87.3.  x is at most 88.
TAMIS_INLINE FloatVec exp(FloatVec x) {
    const FloatVec shifted = x * float(kLog2E) + kRound;
    const FloatVec k = shifted - kRound;
    const FloatVec r = (x - k * 0.693359375f) + k * 2.12194440e-4f;  // ln 2 in two parts
    return choose(x >= -87.3f, power_of_two(shifted, r * float(kLog2E)), FloatVec{});
}

// log2(1 + f) / f for 1 + f between sqrt(1/2) and sqrt(2).
TAMIS_INLINE FloatVec log2_slope(FloatVec f) {
    FloatVec y = all(1.2583704e-1f);
    y = y * f - 2.0726967e-1f;
    y = y * f + 2.1571556e-1f;
    y = y * f - 2.3894483e-1f;
    y = y * f + 2.8791624e-1f;
    y = y * f - 3.6070368e-1f;
    y = y * f + 4.8091063e-1f;
    y = y * f - 7.2134733e-1f;
    return y * f + 1.442695f;
}

// The k for which x / 2^k lies between sqrt(1/2) and sqrt(2), shifted to where the exponent is.
TAMIS_INLINE FloatBits exponent_bits(FloatVec x) { return (bit_cast<FloatBits>(x) - 0x3f3504f3) & ~0x7fffff; }

// x is normal and positive.
TAMIS_INLINE FloatVec log2(FloatVec x) {
    const FloatBits power = exponent_bits(x);
    const FloatVec f = bit_cast<FloatVec>(bit_cast<FloatBits>(x) - power) - 1.0f;
    return log2_slope(f) * f + __builtin_convertvector(power >> 23, FloatVec);
}

// log2(u + lost), where u is rounded.
TAMIS_INLINE FloatVec log2_of_sum(FloatVec u, FloatVec lost) {
    const FloatBits power = exponent_bits(u);
    const FloatVec shrink = bit_cast<FloatVec>(0x3f800000 - power);
    const FloatVec f = (bit_cast<FloatVec>(bit_cast<FloatBits>(u) - power) - 1.0f) + lost * shrink;
    return log2_slope(f) * f + __builtin_convertvector(power >> 23, FloatVec);
}

// log2(1 + x), exact relative to x.  x is above -1 by at least an ulp of 1, and below 2^20.
TAMIS_INLINE FloatVec log2_1p(FloatVec x) {
    const FloatVec u = x + 1.0f;
    return log2_of_sum(u, choose(u > 2.0f, 1.0f - (u - x), x - (u - 1.0f)));
}

// The same for x up to 0.
TAMIS_INLINE FloatVec log2_1p_below(FloatVec x) {
    const FloatVec u = x + 1.0f;
    return log2_of_sum(u, x - (u - 1.0f));
}

template <class F>
TAMIS_INLINE DoubleVec each(DoubleVec x, F function) {
    for (int i = 0; i < kLanes<double>; i++) x[i] = function(x[i]);
    return x;
}

TAMIS_INLINE DoubleVec exp(DoubleVec x) {
    return each(x, [](double a) { return std::exp(a); });
}
TAMIS_INLINE DoubleVec exp2(DoubleVec x) {
    return each(x, [](double a) { return std::exp2(a); });
}
TAMIS_INLINE DoubleVec exp2_normal(DoubleVec x) { return exp2(x); }
TAMIS_INLINE DoubleVec log2(DoubleVec x) {
    return each(x, [](double a) { return std::log2(a); });
}
TAMIS_INLINE DoubleVec log2_1p(DoubleVec x) {
    return each(x, [](double a) { return std::log1p(a) * kLog2E; });
}

TAMIS_INLINE DoubleVec log2_1p_below(DoubleVec x) { return log2_1p(x); }

template <class V>
TAMIS_INLINE V log(V x) {
    using T = Number<V>;
    return log2(x) * T(kLn2);
}

template <class V>
TAMIS_INLINE V log1p(V x) {
    using T = Number<V>;
    return log2_1p(x) * T(kLn2);
}

// e^x - 1, exact relative to x.
template <class V>
TAMIS_INLINE V expm1(V x) {
    using T = Number<V>;
    constexpr int terms = sizeof(T) == 8 ? 15 : 8;
    const auto is_small = (x < T(0.3)) & (x > T(-0.3));
    const V small = choose(is_small, x, V{});
    V y{};
    T factorial = 1;
    for (int j = 2; j <= terms; j++) factorial *= T(j);
    for (int j = terms; j > 0; j--) {
        y = y * small + T(1) / factorial;
        factorial /= T(j);
    }
    return choose(is_small, y * small, exp(x) - T(1));
}

// log2 of the smallest weight that is resolved relative to the largest: safely above underflow.
template <class T>
constexpr T kSmallestLog2 = sizeof(T) == 8 ? T(-1010) : T(-125.5);

}  // namespace tamis
