// Vectors as wide as the instruction set that this file is compiled for has them.
//
// Arithmetic and comparisons are the compiler's own (GCC and clang, any processor); only what they have no word for is
// spelled out per instruction set, each with a form that runs anywhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define TAMIS_INLINE inline __attribute__((always_inline))
#define TAMIS_LAMBDA __attribute__((always_inline))

namespace tamis {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

typedef float FloatVec __attribute__((vector_size(kBytes)));
typedef int32_t FloatBits __attribute__((vector_size(kBytes)));
typedef double DoubleVec __attribute__((vector_size(kBytes)));
typedef int64_t DoubleBits __attribute__((vector_size(kBytes)));

template <class T>
struct Types;
template <>
struct Types<float> {
    using Vec = FloatVec;
    using Bits = FloatBits;  // what a comparison gives: all bits or none, per lane
};
template <>
struct Types<double> {
    using Vec = DoubleVec;
    using Bits = DoubleBits;
};

template <class T>
using Vec = typename Types<T>::Vec;
template <class T>
using Bits = typename Types<T>::Bits;
template <class T>
constexpr int kLanes = kBytes / int(sizeof(T));

template <class V>
using Number = std::remove_reference_t<decltype(std::declval<V&>()[0])>;

template <class T>
constexpr T kInf = std::numeric_limits<T>::infinity();
template <class T>
constexpr T kEps = std::numeric_limits<T>::epsilon();

// ---- loading, storing, choosing

template <class T>
TAMIS_INLINE Vec<T> all(T x) {
    return Vec<T>{} + x;
}

template <class T>
TAMIS_INLINE Vec<T> load(const T* from) {
    Vec<T> x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

template <class T>
TAMIS_INLINE void store(T* to, Vec<T> x) {
    std::memcpy(to, &x, sizeof x);
}

// The first `count` numbers, and `rest` in the other lanes.  Reads nothing beyond them.
template <class T>
TAMIS_INLINE Vec<T> load_some(const T* from, int count, T rest) {
    T lanes[kLanes<T>];
    for (int i = 0; i < kLanes<T>; i++) lanes[i] = rest;
    std::memcpy(lanes, from, size_t(count) * sizeof(T));
    return load(lanes);
}

template <class T>
TAMIS_INLINE void store_some(T* to, Vec<T> x, int count) {
    std::memcpy(to, &x, size_t(count) * sizeof(T));
}

// By masks, where there are some: a copy that is put together in memory is read back late.
#if defined(__AVX512F__)
template <>
TAMIS_INLINE FloatVec load_some<float>(const float* from, int count, float rest) {
    return FloatVec(_mm512_mask_loadu_ps(_mm512_set1_ps(rest), __mmask16((1u << count) - 1), from));
}
template <>
TAMIS_INLINE void store_some<float>(float* to, FloatVec x, int count) {
    _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), __m512(x));
}
#elif defined(__AVX2__)
TAMIS_INLINE __m256i first_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
template <>
TAMIS_INLINE FloatVec load_some<float>(const float* from, int count, float rest) {
    const __m256i mask = first_lanes(count);
    return FloatVec(_mm256_blendv_ps(_mm256_set1_ps(rest), _mm256_maskload_ps(from, mask), _mm256_castsi256_ps(mask)));
}
template <>
TAMIS_INLINE void store_some<float>(float* to, FloatVec x, int count) {
    _mm256_maskstore_ps(to, first_lanes(count), __m256(x));
}
#endif

template <class V, class B>
TAMIS_INLINE V choose(B where, V yes, V no) {
    return where ? yes : no;
}

template <class V>
TAMIS_INLINE V max(V a, V b) {
    return a > b ? a : b;
}

template <class V>
TAMIS_INLINE V min(V a, V b) {
    return a < b ? a : b;
}

template <class To, class From>
TAMIS_INLINE To bit_cast(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

template <class B>
TAMIS_INLINE bool any(B where) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(bit_cast<__m512i>(where), bit_cast<__m512i>(where)) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256(bit_cast<__m256i>(where), bit_cast<__m256i>(where));
#else
    uint64_t bits[kBytes / 8], found = 0;
    std::memcpy(bits, &where, sizeof bits);
    for (uint64_t word : bits) found |= word;
    return found != 0;
#endif
}

// ---- across lanes

template <class T>
TAMIS_INLINE T sum(Vec<T> x) {
    for (int half = kLanes<T> / 2; half > 0; half /= 2) {
        Vec<T> other;
        for (int i = 0; i < kLanes<T>; i++) other[i] = x[(i + half) % kLanes<T>];
        x += other;
    }
    return x[0];
}

template <class T>
TAMIS_INLINE T largest(Vec<T> x) {
    for (int half = kLanes<T> / 2; half > 0; half /= 2) {
        Vec<T> other;
        for (int i = 0; i < kLanes<T>; i++) other[i] = x[(i + half) % kLanes<T>];
        x = max(x, other);
    }
    return x[0];
}

#if defined(__AVX512F__)
template <>
TAMIS_INLINE float sum<float>(FloatVec x) {
    return _mm512_reduce_add_ps(bit_cast<__m512>(x));
}
template <>
TAMIS_INLINE double sum<double>(DoubleVec x) {
    return _mm512_reduce_add_pd(bit_cast<__m512d>(x));
}
template <>
TAMIS_INLINE float largest<float>(FloatVec x) {
    return _mm512_reduce_max_ps(bit_cast<__m512>(x));
}
template <>
TAMIS_INLINE double largest<double>(DoubleVec x) {
    return _mm512_reduce_max_pd(bit_cast<__m512d>(x));
}
#endif

// ---- square roots

TAMIS_INLINE FloatVec sqrt(FloatVec x) {
#if defined(__AVX512F__)
    return bit_cast<FloatVec>(_mm512_sqrt_ps(bit_cast<__m512>(x)));
#elif defined(__AVX2__)
    return bit_cast<FloatVec>(_mm256_sqrt_ps(bit_cast<__m256>(x)));
#else
    for (int i = 0; i < kLanes<float>; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

TAMIS_INLINE DoubleVec sqrt(DoubleVec x) {
#if defined(__AVX512F__)
    return bit_cast<DoubleVec>(_mm512_sqrt_pd(bit_cast<__m512d>(x)));
#elif defined(__AVX2__)
    return bit_cast<DoubleVec>(_mm256_sqrt_pd(bit_cast<__m256d>(x)));
#else
    for (int i = 0; i < kLanes<double>; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

// ---- closing gaps, and opening them again: lanes as bits of a word

using Lanes = uint16_t;

TAMIS_INLINE Lanes lanes_of(FloatBits where) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask(bit_cast<__m512i>(where));
#elif defined(__AVX2__)
    return Lanes(_mm256_movemask_ps(bit_cast<__m256>(where)));
#else
    Lanes lanes = 0;
    for (int i = 0; i < kLanes<float>; i++) lanes |= Lanes(-where[i] << i);
    return lanes;
#endif
}

TAMIS_INLINE Lanes lanes_of(DoubleBits where) {
#if defined(__AVX512F__)
    return _mm512_movepi64_mask(bit_cast<__m512i>(where));
#else
    Lanes lanes = 0;
    for (int i = 0; i < kLanes<double>; i++) lanes |= Lanes(-where[i] << i);
    return lanes;
#endif
}

TAMIS_INLINE int count(uint64_t lanes) { return __builtin_popcountll(lanes); }

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each choice of eight lanes: where chosen ones come from when gaps close, and where they go when gaps open.
struct Moves {
    alignas(8) uint8_t close[256][8], open[256][8];
    constexpr Moves() : close{}, open{} {
        for (int choice = 0; choice < 256; choice++)
            for (int lane = 0, met = 0; lane < 8; lane++) {
                open[choice][lane] = uint8_t(met);
                if (choice >> lane & 1) close[choice][met++] = uint8_t(lane);
            }
    }
};
inline constexpr Moves kMoves;

TAMIS_INLINE __m256i widened(const uint8_t* lanes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(lanes)));
}
#endif

// Write the chosen lanes side by side to `to`; up to a whole vector behind them is overwritten.
TAMIS_INLINE void close_gaps(FloatVec x, Lanes chosen, float* to) {
#if defined(__AVX512F__)
    store(to, bit_cast<FloatVec>(_mm512_maskz_compress_ps(chosen, bit_cast<__m512>(x))));
#elif defined(__AVX2__)
    store(to, bit_cast<FloatVec>(_mm256_permutevar8x32_ps(bit_cast<__m256>(x), widened(kMoves.close[chosen]))));
#else
    for (int i = 0, met = 0; i < kLanes<float>; i++) {
        const float one = x[i];
        std::memcpy(to + met, &one, sizeof one);  // what lies at `to` may be read as integers
        met += chosen >> i & 1;
    }
#endif
}

TAMIS_INLINE void close_gaps(DoubleVec x, Lanes chosen, double* to) {
#if defined(__AVX512F__)
    store(to, bit_cast<DoubleVec>(_mm512_maskz_compress_pd(__mmask8(chosen), bit_cast<__m512d>(x))));
#else
    for (int i = 0, met = 0; i < kLanes<double>; i++) {
        to[met] = x[i];
        met += chosen >> i & 1;
    }
#endif
}

// The way back: numbers side by side into the chosen lanes, zeros into the others.  Reads a whole vector.
TAMIS_INLINE FloatVec open_gaps(const float* from, Lanes chosen) {
#if defined(__AVX512F__)
    return bit_cast<FloatVec>(_mm512_maskz_expand_ps(chosen, bit_cast<__m512>(load(from))));
#elif defined(__AVX2__)
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i kept = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(chosen), bits), bits);
    const __m256 moved = _mm256_permutevar8x32_ps(bit_cast<__m256>(load(from)), widened(kMoves.open[chosen]));
    return bit_cast<FloatVec>(_mm256_and_ps(moved, _mm256_castsi256_ps(kept)));
#else
    FloatVec x{};
    for (int i = 0; i < kLanes<float>; i++)
        if (chosen >> i & 1) x[i] = *from++;
    return x;
#endif
}

TAMIS_INLINE DoubleVec open_gaps(const double* from, Lanes chosen) {
#if defined(__AVX512F__)
    return bit_cast<DoubleVec>(_mm512_maskz_expand_pd(__mmask8(chosen), bit_cast<__m512d>(load(from))));
#else
    DoubleVec x{};
    for (int i = 0; i < kLanes<double>; i++)
        if (chosen >> i & 1) x[i] = *from++;
    return x;
#endif
}

// ---- rows and columns change places

template <class T, int Step, int... Lane>
TAMIS_INLINE void exchange(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, Lane...>) {
    constexpr int n = kLanes<T>;
    const Vec<T> low = __builtin_shufflevector(a, b, (Lane & Step ? n + Lane - Step : Lane)...);
    const Vec<T> high = __builtin_shufflevector(a, b, (Lane & Step ? n + Lane : Lane + Step)...);
    a = low;
    b = high;
}

template <class T, int Step = kLanes<T> / 2>
TAMIS_INLINE void transpose(Vec<T>* rows) {
    for (int i = 0; i < kLanes<T>; i++)
        if (!(i & Step)) exchange<T, Step>(rows[i], rows[i + Step], std::make_integer_sequence<int, kLanes<T>>{});
    if constexpr (Step > 1) transpose<T, Step / 2>(rows);
}

}  // namespace tamis
