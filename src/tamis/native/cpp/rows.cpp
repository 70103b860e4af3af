// alpha-entmax of rows, and its gradients.  Long rows are solved one by one, short ones side by side; which is decided by
// their width alone, and no row's result depends on another, on threads, or on where a part of the work begins.
#include "rows.h"

#include <algorithm>

namespace tamis {
namespace {

// Rows up to this width are solved side by side.
constexpr int64_t kShort = 128;

template <class T>
void fill_strange(Kind kind, const T* z, int64_t n, T* p) {
    T each = 0;
    if (kind == Kind::kNan) each = std::numeric_limits<T>::quiet_NaN();
    if (kind == Kind::kInfinite) each = T(1) / T(std::count(z, z + n, kInf<T>));
    for (int64_t j = 0; j < n; j++) p[j] = kind == Kind::kInfinite && z[j] != kInf<T> ? T(0) : each;
}

template <class T>
struct Forward {
    Scores<T> z;
    Exponents<T> e;
    T* p;
    T* floor;  // a weight must exceed it for gradient to flow

    void one_by_one(int64_t first, int64_t last) const {
        thread_local Row<T> row;
        const int64_t n = z.width;
        for_each_row(z, e, first, last, [&](int64_t r, const T* scores, T largest, Kind kind, Start<T> start) {
            floor[r] = kind == Kind::kInfinite ? kInf<T> : T(0);
            if (kind != Kind::kFinite) return fill_strange(kind, scores, n, p + r * n);
            with_rule<T>(e.of(r), [&](auto rule) {
                rule.begin(start);
                row.solve(rule, scores, n, largest);
            });
            row.put_back(p + r * n, n);
        });
    }

    // Blocks of as many rows as there are lanes.
    void side_by_side(int64_t rows, int64_t first, int64_t last) const {
        thread_local Scratch<T> room;
        constexpr int lanes = kLanes<T>;
        alignas(64) Vec<T> d[kShort + lanes], x[kShort + lanes], y[kShort + lanes], scratch[kShort + lanes];
        const int64_t n = z.width;
        for (int64_t block = first; block < last; block++) {
            const int64_t begin = block * lanes;
            const int count = int(std::min<int64_t>(lanes, rows - begin));
            const T* from[lanes];
            T* narrow = z.is_narrow() ? room.take(n * lanes) : nullptr;
            for (int i = 0; i < lanes; i++) from[i] = z.row(begin + std::min(i, count - 1), narrow + (narrow ? n * i : 0));
            turn(from, n, d);

            Vec<T> largest = all(-kInf<T>);
            Bits<T> strange{};
            for (int64_t j = 0; j < n; j++) {
                strange |= d[j] != d[j];
                largest = max(d[j], largest);
            }
            strange |= (largest == kInf<T>) | (largest == -kInf<T>);
            for (int64_t j = 0; j < n; j++) d[j] = choose(strange, Vec<T>{}, d[j] - largest);
            with_rules<T>(e.in_lanes(begin, count), e.shared, y, scratch, n,
                       [&](auto rule, Vec<T>* weights) { solve_in_lanes(rule, d, x, weights, n); });
            T* to[lanes];
            for (int i = 0; i < count; i++) to[i] = p + (begin + i) * n;
            turn_back(y, n, to, count);
            for (int i = 0; i < count; i++) floor[begin + i] = 0;
            if (any(strange))
                for (int i = 0; i < count; i++)
                    if (strange[i]) rewrite(begin + i, from[i]);
        }
    }

    void rewrite(int64_t r, const T* scores) const {
        const Kind kind = Survey<T>(scores, z.width).kind;
        floor[r] = kind == Kind::kInfinite ? kInf<T> : T(0);
        fill_strange(kind, scores, z.width, p + r * z.width);
    }
};

// The weights of a row that move, and what belongs to them, side by side.
template <class T>
struct Support {
    T* weights = nullptr;
    T* grads = nullptr;
    T* weighed = nullptr;   // s, then the gradient of the scores
    Lanes* kept = nullptr;  // which they are, for each vector of the row
    int64_t size = 0;

    TAMIS_INLINE void gather(const T* p, const T* g, T floor, int64_t n) {
        weights = room_[0].take(n), grads = room_[1].take(n), weighed = room_[2].take(n);
        kept = lanes_.take(n / kLanes<T> + 4);
        const Vec<T> least = all(floor);
        const auto live = [&](Vec<T> w) { return lanes_of(~(w <= least)); };  // no number stays one
        Lanes* lanes = kept;
        int64_t j = 0;
        size = 0;
        const auto keep = [&](Vec<T> w, Vec<T> grad, Lanes chosen) TAMIS_LAMBDA {
            close_gaps(w, chosen, weights + size);
            close_gaps(grad, chosen, grads + size);
            size += count(chosen);
        };
        for (; j + kAtOnce<T> <= n; j += kAtOnce<T>, lanes += 4) {
            Lanes found[4];
            for (int i = 0; i < 4; i++) found[i] = live(load(p + j + i * kLanes<T>));
            if (!note(lanes, found)) continue;
            for (int i = 0; i < 4; i++) keep(load(p + j + i * kLanes<T>), load(g + j + i * kLanes<T>), found[i]);
        }
        for (; j < n; j += kLanes<T>, lanes++) {
            const int some = int(std::min<int64_t>(kLanes<T>, n - j));
            const Vec<T> w = load_some(p + j, some, T(0));
            *lanes = Lanes(live(w) & ((1u << some) - 1));
            keep(w, load_some(g + j, some, T(0)), *lanes);
        }
        store(weights + size, Vec<T>{});  // the end of the last vector: it has no slope
        store(grads + size, Vec<T>{});
    }

    template <class Slope>
    TAMIS_INLINE void solve(Slope slope) {
        T total, dot;
        add_up<T>(size, dot, total, [&](int64_t j, Vec<T>& s) TAMIS_LAMBDA {
            const Vec<T> w = load(weights + j);
            s = choose(w == T(0), Vec<T>{}, slope(w));
            store(weighed + j, s);
            return s * load(grads + j);
        });
        const T mean = total == 0 ? T(0) : dot / total;
        for (int64_t j = 0; j < size; j += kLanes<T>)
            store(weighed + j, load(weighed + j) * (load(grads + j) - mean));
    }

    // The gradient of alpha.  Gradients of scores add up to 0, so kappa may be measured from any value: that of equal
    // weights, or most of it would cancel.
    TAMIS_INLINE T change(T e) const {
        const T equal = size ? curvature(all(T(1) / T(size)), e)[0] : T(0);
        T total, unused;
        add_up<T>(size, total, unused, [&](int64_t j, Vec<T>& none) TAMIS_LAMBDA {
            none = Vec<T>{};
            return (curvature(load(weights + j), e) - equal) * load(weighed + j);
        });
        return -total;
    }

  private:
    Scratch<T> room_[3];
    Scratch<Lanes> lanes_;
};

template <class T>
struct Backward {
    const T* p;
    const T* floor;
    const T* g;
    Exponents<T> e;
    int64_t g_stride, width;
    T* dz;
    T* de;  // or null where nobody asks

    void operator()(int64_t first, int64_t last) const {
        thread_local Support<T> support;
        for (int64_t r = first; r < last; r++) {
            support.gather(p + r * width, g + r * g_stride, floor[r], width);
            with_slope<T>(e.of(r), [&](auto slope) { support.solve(slope); });
            put_back(support.weighed, support.kept, all(T(1)), dz + r * width, width);
            if (de) de[r] = support.change(e.of(r));
        }
    }
};

template <class T>
Status forward(Scores<T> z, Exponents<T> e, int64_t rows, T* p, T* floor) {
    const Forward<T> work{z, e, p, floor};
    if (z.width > kShort)
        return in_parallel(rows, kGrain / z.width, [&](int64_t a, int64_t b) { work.one_by_one(a, b); });
    const int64_t blocks = (rows + kLanes<T> - 1) / kLanes<T>;
    return in_parallel(blocks, kGrain / (z.width * kLanes<T>), [&](int64_t a, int64_t b) { work.side_by_side(rows, a, b); });
}

}  // namespace

extern "C" {

TAMIS_PUBLIC int32_t tamis_forward(
    const void* z, Dtype dtype, int64_t stride, int64_t rows, int64_t width, const void* e, int32_t e_shared, void* p,
    void* floor) {
    if (dtype == Dtype::kDouble)
        return forward<double>({z, dtype, stride, width}, {static_cast<const double*>(e), e_shared != 0}, rows,
                               static_cast<double*>(p), static_cast<double*>(floor));
    return forward<float>({z, dtype, stride, width}, {static_cast<const float*>(e), e_shared != 0}, rows,
                          static_cast<float*>(p), static_cast<float*>(floor));
}

TAMIS_PUBLIC int32_t tamis_backward(
    const void* p, const void* floor, const void* g, int64_t g_stride, int32_t is_double, int64_t rows, int64_t width,
    const void* e, int32_t e_shared, void* dz, void* de) {
    const auto run = [&](auto zero) {
        using T = decltype(zero);
        const Backward<T> work{static_cast<const T*>(p), static_cast<const T*>(floor), static_cast<const T*>(g),
                               {static_cast<const T*>(e), e_shared != 0}, g_stride, width,
                               static_cast<T*>(dz), static_cast<T*>(de)};
        return in_parallel(rows, kGrain / width, work);
    };
    return is_double ? run(0.0) : run(0.0f);
}

}  // extern "C"

}  // namespace tamis
