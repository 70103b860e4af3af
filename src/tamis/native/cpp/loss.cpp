// Fenchel-Young losses of rows, v the target times its weight:  loss = sum(v) conjugate(z) - <v, z>,  gradient sum(v) p - v.
//
// No weights are stored: the backward pass computes them once more from the scores and from four numbers of each row.
#include <algorithm>

#include "rows.h"

namespace tamis {
namespace {

// What is kept of a row, as rows of a matrix: its largest score, the rule's state and rest, what the weights add up to; the
// slope of the conjugate in alpha, the weight of the sample, sum(v).
enum Kept { kLargest, kState, kRest, kTotal, kSlope, kSample, kTargets };

template <class T>
struct Loss {
    const int64_t* target;  // or null: the conjugate alone
    const T* weight;        // of each class, or null: 1
    int64_t ignored;
    T hard, soft;           // share of the target, and of every class

    // Of a vector of classes.
    TAMIS_INLINE Vec<T> spread(int64_t j, int count) const {
        if (!weight) return all(soft);
        return (count < kLanes<T> ? load_some(weight + j, count, T(0)) : load(weight + j)) * soft;
    }
};

template <class T>
TAMIS_INLINE Vec<T> read(const T* from, int count, T rest) {
    return count < kLanes<T> ? load_some(from, count, rest) : load(from);
}

// Sums over the support: of p d and of what alpha moves, and the largest weight.
template <class T>
struct Moments {
    T mean = 0, slope = 0;
    Vec<T> largest{};

    template <class Rule>
    TAMIS_INLINE Moments(const Rule& rule, const Row<T>& row, T e, bool with_slope) {
        const Vec<T> share = all(T(1) / row.total);
        T unused;
        add_up<T>(row.count, mean, unused, [&](int64_t j, Vec<T>& none) TAMIS_LAMBDA {
            const Vec<T> p = weights(row, j) * share;
            none = Vec<T>{};
            largest = max(p, largest);
            return choose(p > T(0), p * rule.distance(load(row.x + j)), Vec<T>{});
        });
        if (!with_slope) return;
        T entropy, curved;
        add_up<T>(row.count, entropy, curved, [&](int64_t j, Vec<T>& bent) TAMIS_LAMBDA {
            const Vec<T> p = weights(row, j) * share;
            const auto live = p > kSmallest<T>;
            const Vec<T> log_p = log(choose(live, p, all(T(1))));
            const Vec<T> t = log_p * e;
            bent = p * log_p * log_p * curl(t);
            return choose(live, p * log_p * choose(t == T(0), all(T(1)), expm1(t) / t), Vec<T>{});
        });
        slope = (entropy / (1 + e) - curved) / (1 + e);
    }

    // The end of the last vector holds what earlier rows left.
    static TAMIS_INLINE Vec<T> weights(const Row<T>& row, int64_t j) {
        return read(row.y + j, int(std::min<int64_t>(kLanes<T>, row.count - j)), T(0));
    }
};

template <class T>
struct Forward {
    Scores<T> z;
    Exponents<T> e;
    Loss<T> of;
    T spread_total;  // sum of what smoothing adds to v
    int64_t rows;
    T* losses;
    T* kept;
    bool with_slope;

    void operator()(int64_t first, int64_t last) const {
        thread_local Row<T> row;
        thread_local Scratch<T> room;
        const int64_t n = z.width;
        for_each_row(z, e, first, last, [&](int64_t r, const T* scores, T largest, Kind kind, Start<T> start) {
            keep(kLargest, r) = kind == Kind::kNan ? std::numeric_limits<T>::quiet_NaN() : largest;
            if (kind == Kind::kInfinite) {  // what ties for the largest is all there is
                T* ties = room.take(n);
                for (int64_t j = 0; j < n; j++) ties[j] = scores[j] == kInf<T> ? T(0) : -kInf<T>;
                scores = ties;
                largest = 0;
                start = Start<T>{};
            }
            T conjugate = kind == Kind::kEmpty ? kInf<T> : kind == Kind::kNan ? std::numeric_limits<T>::quiet_NaN() : T(0);
            if (kind == Kind::kFinite || kind == Kind::kInfinite)
                with_rule<T>(e.of(r), [&](auto rule) {
                    if (kind == Kind::kFinite) rule.begin(start);
                    row.solve(rule, scores, n, largest);
                    conjugate = conjugate_of(rule, row, r);
                });
            losses[r] = of.target ? loss(r, scores, largest, kind, conjugate) : conjugate;
        });
    }

    T& keep(Kept what, int64_t r) const { return kept[what * rows + r]; }

    template <class Rule>
    T conjugate_of(const Rule& rule, const Row<T>& row, int64_t r) const {
        const T power = e.of(r);
        const Moments<T> moments(rule, row, power, with_slope);
        keep(kState, r) = rule.state()[0];
        keep(kRest, r) = rule.rest()[0];
        keep(kTotal, r) = row.total;
        keep(kSlope, r) = moments.slope;
        const T theta = -std::log(largest<T>(moments.largest));
        const T safe = std::max(power, T(1e-20));  // so small an e gives the limit at alpha = 1
        return std::max(T(0), (power * moments.mean - std::expm1(-safe * theta) / safe) / (1 + power));
    }

    T loss(int64_t r, const T* scores, T largest, Kind kind, T conjugate) const {
        const bool counts = of.target[r] != of.ignored;
        const int64_t target = counts ? of.target[r] : 0;
        if (target < 0 || target >= z.width) throw std::out_of_range("target");
        const T sample = of.weight ? of.weight[target] : T(1);
        T total = sample * of.hard;
        T score = total == 0 ? T(0) : total * (scores[target] - largest);
        if (of.soft > 0) {
            total += spread_total;
            score += spread(scores, largest);
        }
        keep(kSample, r) = counts ? sample : T(0);
        keep(kTargets, r) = total;
        if (!counts) return T(0);
        return kind == Kind::kEmpty ? kInf<T> : total * conjugate - score;
    }

    // <soft part of v, d>
    T spread(const T* scores, T largest) const {
        T total, unused;
        add_up<T>(z.width, total, unused, [&](int64_t j, Vec<T>& none) TAMIS_LAMBDA {
            const int count = int(std::min<int64_t>(kLanes<T>, z.width - j));
            const Vec<T> d = read(scores + j, count, largest) - largest, v = of.spread(j, count);
            none = Vec<T>{};
            return choose((v == T(0)) & (d == -kInf<T>), Vec<T>{}, v * d);
        });
        return total;
    }
};

template <class T>
struct Backward {
    Scores<T> z;
    Exponents<T> e;
    Loss<T> of;
    int64_t rows;
    const T* kept;
    const T* g;
    int64_t g_stride;
    T* dz;
    T* de;  // or null where nobody asks

    void operator()(int64_t first, int64_t last) const {
        thread_local Scratch<T> room;
        const int64_t n = z.width;
        T* narrow = z.is_narrow() ? room.take(n) : nullptr;
        for (int64_t r = first; r < last; r++) {
            const T largest = keep(kLargest, r);
            const bool counts = !of.target || of.target[r] != of.ignored;
            const T soft = counts ? g[r * g_stride] : T(0);
            const T factor = of.target ? soft * keep(kTargets, r) : soft;
            const bool moves = largest > -kInf<T> && largest < kInf<T>;
            if (de) de[r] = moves || largest == kInf<T> ? factor * keep(kSlope, r) : largest == -kInf<T> ? T(0) : largest;
            T* out = dz + r * n;
            if (!moves) {
                std::fill(out, out + n, largest == largest ? T(0) : largest);
                continue;
            }
            with_rule<T>(e.of(r), [&](auto rule) {
                rule.resume(all(keep(kState, r)), all(keep(kRest, r)));
                gradient(rule, z.row(r, narrow), out, largest, factor / keep(kTotal, r), soft);
            });
            if (of.target && counts) out[of.target[r]] -= soft * keep(kSample, r) * of.hard;
        }
    }

    const T& keep(Kept what, int64_t r) const { return kept[what * rows + r]; }

    template <class Rule>
    TAMIS_INLINE void gradient(const Rule& rule, const T* scores, T* out, T largest, T share, T soft) const {
        const int64_t n = z.width;
        const bool spreads = of.target && of.soft > 0;
        const Vec<T> lowest = rule.lowest();
        for (int64_t j = 0; j < n; j += kLanes<T>) {
            const int count = int(std::min<int64_t>(kLanes<T>, n - j));
            const Vec<T> x = rule.again(read(scores + j, count, -kInf<T>) - largest);
            Vec<T> gradient{}, unused;
            if (any(x > lowest)) gradient = rule.weight(x, unused) * share;
            if (spreads) gradient -= of.spread(j, count) * soft;
            if (count < kLanes<T>)
                store_some(out + j, gradient, count);
            else
                store(out + j, gradient);
        }
    }
};

template <class T>
Loss<T> loss_of(const void* target, const void* weight, int64_t ignored, double smoothing, int64_t width) {
    return {static_cast<const int64_t*>(target), static_cast<const T*>(weight), ignored, T(1 - smoothing), T(smoothing / double(width))};
}

template <class T>
T total_spread(const Loss<T>& loss, int64_t width) {
    double total = 0;
    for (int64_t j = 0; j < width; j++) total += loss.weight ? loss.weight[j] : T(1);
    return T(total * loss.soft);
}

}  // namespace

extern "C" {

// dtype and stride: of z.  The others are double if z is, else float.  target, weight and de may be null.
TAMIS_PUBLIC int32_t tamis_loss_forward(
    const void* z, Dtype dtype, int64_t stride, int64_t rows, int64_t width, const void* e, int32_t e_shared,
    const void* target, const void* weight, int64_t ignored, double smoothing, void* losses, void* kept, int32_t with_slope) {
    const auto run = [&](auto zero) {
        using T = decltype(zero);
        const Loss<T> loss = loss_of<T>(target, weight, ignored, smoothing, width);
        const T spread = smoothing > 0 ? total_spread(loss, width) : T(0);
        const Forward<T> work{{z, dtype, stride, width}, {static_cast<const T*>(e), e_shared != 0}, loss, spread, rows,
                              static_cast<T*>(losses), static_cast<T*>(kept), with_slope != 0};
        return in_parallel(rows, kGrain / width, work);
    };
    return dtype == Dtype::kDouble ? run(0.0) : run(0.0f);
}

TAMIS_PUBLIC int32_t tamis_loss_backward(
    const void* z, Dtype dtype, int64_t stride, int64_t rows, int64_t width, const void* e, int32_t e_shared,
    const void* target, const void* weight, int64_t ignored, double smoothing, const void* kept, const void* g,
    int64_t g_stride, void* dz, void* de) {
    const auto run = [&](auto zero) {
        using T = decltype(zero);
        const Backward<T> work{{z, dtype, stride, width}, {static_cast<const T*>(e), e_shared != 0},
                               loss_of<T>(target, weight, ignored, smoothing, width), rows, static_cast<const T*>(kept),
                               static_cast<const T*>(g), g_stride, static_cast<T*>(dz), static_cast<T*>(de)};
        return in_parallel(rows, kGrain / width, work);
    };
    return dtype == Dtype::kDouble ? run(0.0) : run(0.0f);
}

}  // extern "C"

}  // namespace tamis
