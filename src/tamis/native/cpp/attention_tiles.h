// Dense products of small matrices, in registers, and keys turned so that a vector holds one number of many keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "attention.h"
#include "solve.h"

namespace tamis {

constexpr int kWide = kLanes<float>;
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;
#else
constexpr int kTileRows = 6, kTileVectors = 2;
#endif
constexpr int kPanel = kTileVectors * kWide;  // keys that are scored together

TAMIS_INLINE int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// One number in all lanes, by a single load.
TAMIS_INLINE FloatVec same(const float* from) {
#if defined(__AVX512F__)
    return bit_cast<FloatVec>(_mm512_set1_ps(*from));
#elif defined(__AVX2__)
    return bit_cast<FloatVec>(_mm256_broadcast_ss(from));
#else
    return all(*from);
#endif
}

// c[m][0..N vectors) (+)= sum over k of a[m][k * step] * b[k * ldb ..]: one chain of sums for each number, in the order of
// k, so that it does not matter in which tile a row is.
template <int M, int N>
void tile(const float* const* a, int64_t step, const float* b, int64_t ldb, int64_t depth, float* const* c, bool add) {
    FloatVec sums[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sums[m][n] = add ? load(c[m] + n * kWide) : FloatVec{};
    const float* rows[M];
    for (int m = 0; m < M; m++) rows[m] = a[m];
    for (int64_t k = 0, at = 0; k < depth; k++, at += step, b += ldb) {
        FloatVec column[N];
        for (int n = 0; n < N; n++) column[n] = load(b + n * kWide);
        for (int m = 0; m < M; m++) {
            const FloatVec x = same(rows[m] + at);
            for (int n = 0; n < N; n++) sums[m][n] += x * column[n];
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(c[m] + n * kWide, sums[m][n]);
}

template <int N>
void tiles(int rows, const float* const* a, int64_t step, const float* b, int64_t ldb, int64_t depth, float* const* c, bool add) {
    static_assert(kTileRows == 6);
    switch (rows) {
        case 6: return tile<6, N>(a, step, b, ldb, depth, c, add);
        case 5: return tile<5, N>(a, step, b, ldb, depth, c, add);
        case 4: return tile<4, N>(a, step, b, ldb, depth, c, add);
        case 3: return tile<3, N>(a, step, b, ldb, depth, c, add);
        case 2: return tile<2, N>(a, step, b, ldb, depth, c, add);
        default: return tile<1, N>(a, step, b, ldb, depth, c, add);
    }
}

// So many rows of b stay in the first cache while all rows of a pass by.
constexpr int64_t kDepth = 96;

// The same for any number of rows, any columns in whole vectors and any depth.
inline void multiply(
    int64_t rows, const float* const* a, int64_t step, const float* b, int64_t ldb, int64_t depth, float* const* c,
    int64_t columns, bool add) {
    int64_t begin = 0;
    do {
        const int64_t some_depth = std::min(kDepth, depth - begin);
        for (int64_t j = 0; j < columns; j += kPanel) {
            const int vectors = int(std::min<int64_t>(kPanel, columns - j) / kWide);
            const float* corner = b + begin * ldb + j;
            for (int64_t i = 0; i < rows; i += kTileRows) {
                const int some = int(std::min<int64_t>(kTileRows, rows - i));
                const float* from[kTileRows];
                float* to[kTileRows];
                for (int m = 0; m < some; m++) from[m] = a[i + m] + begin * step, to[m] = c[i + m] + j;
                const bool more = add || begin > 0;
                switch (vectors) {
#if defined(__AVX512F__)
                    case 4: tiles<4>(some, from, step, corner, ldb, some_depth, to, more); break;
                    case 3: tiles<3>(some, from, step, corner, ldb, some_depth, to, more); break;
#endif
                    case 2: tiles<2>(some, from, step, corner, ldb, some_depth, to, more); break;
                    default: tiles<1>(some, from, step, corner, ldb, some_depth, to, more);
                }
            }
        }
        begin += kDepth;
    } while (begin < depth);
}

// Keys or values of one head: rows, possibly in pages, and panels of kPanel of them with columns side by side.
class Rows {
  public:
    // `keep`: panels are looked at more than once.
    void begin(const Attention& call, const Tensor& tensor, int64_t step, int64_t dim, int64_t b, int64_t h, bool keep) {
        base_ = call.pages ? tensor.at(0, h, 0) : tensor.at(b, h, 0);
        row_ = tensor.row, step_ = step, dim_ = dim, keep_ = keep;
        // Pages beyond the length of a sequence need not be there.
        count_ = call.lengths ? std::clamp<int64_t>(call.lengths[b], 0, call.keys) : call.keys;
        pages_ = call.pages ? call.pages + b * call.pages_batch : nullptr;
        page_ = call.page, page_distance_ = tensor.batch;
        const int64_t panels = (count_ + kPanel - 1) / kPanel;
        turned_ = room_.take((keep ? panels : 1) * kPanel * dim);
        done_.assign(size_t(keep ? panels : 0), false);
    }

    const float* row(int64_t j) const {
        return pages_ ? base_ + pages_[j / page_] * page_distance_ + j % page_ * row_ : base_ + j * row_;
    }
    bool is_paged() const { return pages_ != nullptr; }
    int64_t distance() const { return row_; }
    int64_t count() const { return count_; }

    // Number d of keys kPanel * number and on at [d * ldb]; zeros beyond the last.
    const float* panel(int64_t number, int64_t& ldb) {
        const int64_t first = number * kPanel;
        if (step_ != 1 && first + kPanel <= count_) return ldb = step_, base_ + first;
        ldb = kPanel;
        float* to = turned_ + (keep_ ? number * kPanel * dim_ : 0);
        if (!keep_ || !done_[size_t(number)]) turn(first, to);
        if (keep_) done_[size_t(number)] = true;
        return to;
    }

    bool is_finite(int64_t first, int64_t last) const {
        FloatVec sums{};  // 0 times what is not finite is no number
        for (int64_t j = first; j < last; j++)
            for (int64_t d = 0; d < dim_; d += kWide) sums += load(row(j) + d) * 0.0f;
        return sum<float>(sums) == 0.0f;
    }

    // The largest square of a norm; no number if there is none.
    float longest(int64_t first, int64_t last) const {
        float most = 0;
        for (int64_t j = first; j < last; j++) {
            FloatVec squares{};
            for (int64_t d = 0; d < dim_; d += kWide) squares += load(row(j) + d) * load(row(j) + d);
            const float square = sum<float>(squares);
            most = square <= most ? most : square;
        }
        return most;
    }

  private:
    const float* base_ = nullptr;
    int64_t row_ = 0, step_ = 1, dim_ = 0, count_ = 0, page_ = 0, page_distance_ = 0;
    const int32_t* pages_ = nullptr;
    bool keep_ = false;
    float* turned_ = nullptr;
    Scratch<float> room_;
    std::vector<bool> done_;

    void turn(int64_t first, float* to) const {
        for (int v = 0; v < kTileVectors; v++, first += kWide) {
            const int count = int(std::clamp<int64_t>(count_ - first, 0, kWide));
            for (int64_t d = 0; d < dim_; d += step_ == 1 ? kWide : 1) {
                float* at = to + d * kPanel + v * kWide;
                if (step_ != 1) {
                    store(at, count > 0 ? load_some(base_ + first + d * step_, count, 0.0f) : FloatVec{});
                    continue;
                }
                FloatVec square[kWide];
                for (int i = 0; i < kWide; i++) square[i] = i < count ? load(row(first + i) + d) : FloatVec{};
                transpose<float>(square);
                for (int i = 0; i < kWide; i++) store(at + i * kPanel, square[i]);
            }
        }
    }
};

// ---- sums over the support of a row

// Lane i of what is returned is the sum of vector i: vectors fold into one.
template <int Step = kWide / 2>
TAMIS_INLINE FloatVec fold(FloatVec* x) {
    for (int i = 0; i < Step; i++) {
        exchange<float, Step>(x[i], x[i + Step], std::make_integer_sequence<int, kWide>{});
        x[i] += x[i + Step];
    }
    if constexpr (Step > 1)
        return fold<Step / 2>(x);
    else
        return x[0];
}

// Calls work(vectors as a constant, first column) for parts of `dim` columns that fit the registers.
template <class Work>
TAMIS_INLINE void for_columns(int64_t dim, Work work) {
    int64_t at = 0;
    for (; at + 8 * kWide <= dim; at += 8 * kWide) work(std::integral_constant<int, 8>{}, at);
    for (; at + 4 * kWide <= dim; at += 4 * kWide) work(std::integral_constant<int, 4>{}, at);
    for (; at < dim; at += kWide) work(std::integral_constant<int, 1>{}, at);
}

// Weights of keys by their numbers.
struct Support {
    const int32_t* keys = nullptr;
    const float* weights = nullptr;
    int64_t count = 0;
};

// out = sum of weight * row
inline void gather(const Support& support, const Rows& rows, int64_t dim, float* out, float scale) {
    for_columns(dim, [&](auto vectors, int64_t at) TAMIS_LAMBDA {
        constexpr int N = decltype(vectors)::value;
        FloatVec sums[N] = {};
        for (int64_t j = 0; j < support.count; j++) {
            const float* from = rows.row(support.keys[j]) + at;
            const FloatVec weight = same(support.weights + j);
            for (int n = 0; n < N; n++) sums[n] += weight * load(from + n * kWide);
        }
        for (int n = 0; n < N; n++) store(out + at + n * kWide, sums[n] * scale);
    });
}

// to[key] += weight * row, for rows of `to` that lie `distance` apart
inline void scatter(const Support& support, const float* row, int64_t dim, float* to, int64_t distance) {
    for_columns(dim, [&](auto vectors, int64_t at) TAMIS_LAMBDA {
        constexpr int N = decltype(vectors)::value;
        FloatVec x[N];
        for (int n = 0; n < N; n++) x[n] = load(row + at + n * kWide);
        for (int64_t j = 0; j < support.count; j++) {
            float* into = to + support.keys[j] * distance + at;
            const FloatVec weight = same(support.weights + j);
            for (int n = 0; n < N; n++) store(into + n * kWide, load(into + n * kWide) + weight * x[n]);
        }
    });
}

// products[j] = row . rows[key], up to whole vectors of j.  N: vectors of a row, 0 if that is not known.
template <int N>
void project(const Support& support, const Rows& rows, const float* row, int64_t dim, float* products) {
    FloatVec own[N + 1];
    for (int n = 0; n < N; n++) own[n] = load(row + n * kWide);
    for (int64_t j = 0; j < support.count; j += kWide) {
        FloatVec sums[kWide];
        const int some = support.count - j > kWide / 2 ? kWide : kWide / 2;
        for (int i = some; i < kWide; i++) sums[i] = FloatVec{};
        for (int i = 0; i < some; i++) {
            const float* from = rows.row(support.keys[j + i < support.count ? j + i : j]);
            FloatVec total{};
            for (int n = 0; n < N; n++) total += own[n] * load(from + n * kWide);
            if (N == 0)
                for (int64_t d = 0; d < dim; d += kWide) total += load(row + d) * load(from + d);
            sums[i] = total;
        }
        store(products + j, fold(sums));
    }
}

// Calls work(vectors of a row as a constant, 0 if it is no usual number).
template <class Work>
TAMIS_INLINE void with_vectors(int64_t dim, Work work) {
    switch (dim / kWide) {
        case 2: return work(std::integral_constant<int, 2>{});
        case 4: return work(std::integral_constant<int, 4>{});
        case 8: return work(std::integral_constant<int, 8>{});
        default: return work(std::integral_constant<int, 0>{});
    }
}

inline void project(const Support& support, const Rows& rows, const float* row, int64_t dim, float* products) {
    with_vectors(dim, [&](auto n) { project<decltype(n)::value>(support, rows, row, dim, products); });
}

// products[j] = row . rows[first + j] for whole vectors of j: for so few rows that to turn the keys is not worth it.
template <int N>
void project_all(const Rows& rows, int64_t first, int64_t last, const float* row, int64_t dim, float* products) {
    FloatVec own[N + 1];
    for (int n = 0; n < N; n++) own[n] = load(row + n * kWide);
    for (int64_t j = first; j < last; j += kWide) {
        FloatVec sums[kWide];
        for (int i = 0; i < kWide; i++) {
            const float* from = rows.row(std::min(j + i, last - 1));
            const float* later = rows.row(std::min(j + i + 2 * kWide, last - 1));  // pages are not where one expects them
            for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(later + d);
            FloatVec total{};
            for (int n = 0; n < N; n++) total += own[n] * load(from + n * kWide);
            if (N == 0)
                for (int64_t d = 0; d < dim; d += kWide) total += load(row + d) * load(from + d);
            sums[i] = total;
        }
        store(products + j - first, fold(sums));
    }
}

}  // namespace tamis
