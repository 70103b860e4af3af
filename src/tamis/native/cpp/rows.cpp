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
        for (int64_t r = first; r < last; r++)
            with_slope<T>(e.of(r), [&](auto slope) { row(r, slope); });
    }

    template <class Slope>
    void row(int64_t r, Slope slope) const {
        const T* weights = p + r * width;
        const T* grads = g + r * g_stride;
        T* out = dz + r * width;
        const Vec<T> least = all(floor[r]);
        T total, dot;
        Bits<T> met{};
        add_up<T>(width, dot, total, [&](int64_t j, Vec<T>& s) TAMIS_LAMBDA {
            const int count = int(std::min<int64_t>(kLanes<T>, width - j));
            const Vec<T> w = read(weights + j, count);
            s = Vec<T>{};
            Vec<T> product{};
            const Bits<T> live = ~(w <= least);  // no number stays one
            if (any(live)) {
                met += live;
                s = choose(live, slope(w), Vec<T>{});
                product = choose(live, s * read(grads + j, count), Vec<T>{});
            }
            write(out + j, s, count);
            return product;
        });
        const T mean = total == 0 ? T(0) : dot / total;
        // Gradients add up to 0, so kappa may be measured from any value: that of equal weights, where most would cancel.
        const T support = sum<T>(__builtin_convertvector(-met, Vec<T>));
        const T equal = de && support > 0 ? curvature(all(1 / support), e.of(r))[0] : T(0);
        T unused, change = 0;
        add_up<T>(width, change, unused, [&](int64_t j, Vec<T>& none) TAMIS_LAMBDA {
            const int count = int(std::min<int64_t>(kLanes<T>, width - j));
            const Vec<T> s = read(out + j, count);
            none = Vec<T>{};
            if (!any(~(s == T(0)))) return Vec<T>{};
            const Vec<T> gradient = choose(s == T(0), Vec<T>{}, s * (read(grads + j, count) - mean));
            write(out + j, gradient, count);
            return de ? (curvature(read(weights + j, count), e.of(r)) - equal) * gradient : Vec<T>{};
        });
        if (de) de[r] = -change;
    }

    static TAMIS_INLINE Vec<T> read(const T* from, int count) {
        return count == kLanes<T> ? load(from) : load_some(from, count, T(0));
    }
    static TAMIS_INLINE void write(T* to, Vec<T> x, int count) {
        if (count == kLanes<T>)
            store(to, x);
        else
            store_some(to, x, count);
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
