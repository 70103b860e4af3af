// What rows and losses share: the alpha of each row, the rule and the slope that go with it, and where to begin.
#pragma once

#include "scores.h"
#include "solve.h"
#include "threads.h"

#define TAMIS_PUBLIC __attribute__((visibility("default")))

namespace tamis {

// Scores that a thread takes at least.
constexpr int64_t kGrain = 16384;

// e = alpha - 1 between 0 and 1: one for all rows, or one for each.
template <class T>
struct Exponents {
    const T* data;
    bool shared;

    T of(int64_t row) const { return shared ? data[0] : data[row]; }
    Vec<T> in_lanes(int64_t first, int count) const {
        Vec<T> e;
        for (int i = 0; i < kLanes<T>; i++) e[i] = of(first + (i < count ? i : count - 1));
        return e;
    }
};

// Calls work(rule) with the rule of e.
template <class T, class Work>
TAMIS_INLINE void with_rule(T e, Work work) {
    if (e < kNearOne<T>)
        work(Relative<T>(all(e)));
    else if (e == T(0.5))
        work(Squares<T>(all(e)));
    else if (e == T(1))
        work(Identity<T>(all(e)));
    else
        work(Powers<T>(all(e)));
}

// Calls work(rule, out) and has `out` hold what belongs to the e of each lane at the end.
template <class T, class Work>
TAMIS_INLINE void with_rules(Vec<T> e, bool shared, Vec<T>* out, Vec<T>* scratch, int64_t n, Work work) {
    if (shared) return with_rule<T>(e[0], [&](auto rule) { work(rule, out); });
    const Bits<T> near = e < kNearOne<T>;
    if (!any(near)) return work(Powers<T>(e), out);
    work(Relative<T>(choose(near, e, Vec<T>{})), out);
    if (!any(~near)) return;
    work(Powers<T>(choose(near, all(T(0.5)), e)), scratch);
    for (int64_t j = 0; j < n; j++) out[j] = choose(near, out[j], scratch[j]);
}

// ---- derivatives: s = p^(1 - e), and kappa, by which alpha moves the weights

template <class T>
constexpr T kSmallest = sizeof(T) == 8 ? T(1e-304) : T(1.7e-38);  // about 2^kSmallestLog2

template <class T>
struct SlopeOfSquares {
    Vec<T> operator()(Vec<T> p) const { return sqrt(max(p, all(kSmallest<T>))) + (p - p); }  // no number stays one
    Vec<T> of_log(Vec<T> p, Vec<T>) const { return (*this)(p); }
};

template <class T>
struct SlopeOfIdentity {
    Vec<T> operator()(Vec<T> p) const { return all(T(1)) + (p - p); }
    Vec<T> of_log(Vec<T> p, Vec<T>) const { return (*this)(p); }
};

template <class T>
struct SlopeOfPowers {
    T rest;
    Vec<T> operator()(Vec<T> p) const { return of_log(p, log2(max(p, all(kSmallest<T>)))); }
    Vec<T> of_log(Vec<T> p, Vec<T> log2_p) const { return exp2(log2_p * rest) + (p - p); }
};

template <class T, class Work>
TAMIS_INLINE void with_slope(T e, Work work) {
    if (e == T(0.5))
        work(SlopeOfSquares<T>{});
    else if (e == T(1))
        work(SlopeOfIdentity<T>{});
    else
        work(SlopeOfPowers<T>{T(1) - e});
}

// (t e^t - expm1 t) / t^2 for t <= 0, 1/2 at 0: summed where t is small, so that nothing cancels.
template <class V>
TAMIS_INLINE V curl(V t) {
    using T = Number<V>;
    constexpr int terms = sizeof(T) == 8 ? 18 : 8;
    const auto is_small = t > (sizeof(T) == 8 ? T(-0.5) : T(-0.3));
    const V near = choose(is_small, t, V{}), far = choose(is_small, all(T(-1)), t);
    V series{};
    T factorial = 1;
    for (int j = 2; j <= terms + 1; j++) factorial *= T(j);
    for (int j = terms + 1; j > 1; j--) {  // sum over j >= 2 of (j - 1) t^(j - 2) / j!
        series = series * near + T(j - 1) / factorial;
        factorial /= T(j);
    }
    const V grown = exp(far);
    return choose(is_small, series, (far * grown - (grown - T(1))) / (far * far));
}

// kappa = (ln p)^2 curl(e ln p), 0 where p is 0.
template <class V>
TAMIS_INLINE V curvature_of_log(V log_p, Number<V> e) {
    return log_p * log_p * curl(log_p * e);
}
template <class V>
TAMIS_INLINE V curvature(V p, Number<V> e) {
    using T = Number<V>;
    const auto live = p > kSmallest<T>;
    return choose(live, curvature_of_log(log(choose(live, p, all(T(1)))), e), V{});
}

// ---- rows into lanes and back

template <class T>
TAMIS_INLINE void turn(const T* const* rows, int64_t n, Vec<T>* columns) {
    constexpr int lanes = kLanes<T>;
    for (int64_t j = 0; j < n; j += lanes) {
        for (int i = 0; i < lanes; i++)
            columns[j + i] = n - j < lanes ? load_some(rows[i] + j, int(n - j), T(0)) : load(rows[i] + j);
        transpose<T>(columns + j);
    }
}

template <class T>
TAMIS_INLINE void turn_back(const Vec<T>* columns, int64_t n, T* const* rows, int count) {
    constexpr int lanes = kLanes<T>;
    for (int64_t j = 0; j < n; j += lanes) {
        Vec<T> tile[lanes];
        for (int i = 0; i < lanes; i++) tile[i] = columns[j + i];
        transpose<T>(tile);
        for (int i = 0; i < count; i++) {
            if (n - j < lanes)
                store_some(rows[i] + j, tile[i], int(n - j));
            else
                store(rows[i] + j, tile[i]);
        }
    }
}

// ---- where to begin

// Rows up to this width are begun together, as many as there are lanes; wider ones would not stay in the cache.
constexpr int64_t kTogether = 4096;

// Calls work(row, z, largest, kind, start) for each row from first to last.
template <class T, class Work>
TAMIS_INLINE void for_each_row(const Scores<T>& z, const Exponents<T>& e, int64_t first, int64_t last, Work work) {
    thread_local Scratch<T> room;
    constexpr int lanes = kLanes<T>;
    const int64_t n = z.width;
    T* narrow = z.is_narrow() ? room.take(n) : nullptr;
    if (n > kTogether) {
        for (int64_t r = first; r < last; r++) {
            const T* scores = z.row(r, narrow);
            const Survey<T> survey(scores, n);
            Start<T> start{};
            if (survey.kind == Kind::kFinite) with_rule<T>(e.of(r), [&](auto rule) { start = survey.bound(rule); });
            work(r, scores, survey.largest, survey.kind, start);
        }
        return;
    }
    alignas(64) Vec<T> columns[kGroups<T>], x[kGroups<T>], y[kGroups<T>];
    T maxima[lanes][kGroups<T>];
    for (int64_t r = first; r < last; r += lanes) {
        const int count = int(last - r < lanes ? last - r : lanes);
        T largest[lanes];
        Kind kinds[lanes];
        const T* rows[lanes];
        for (int i = 0; i < lanes; i++) {
            rows[i] = maxima[i < count ? i : 0];
            if (i >= count) continue;
            const Survey<T> survey(z.row(r + i, narrow), n);
            largest[i] = survey.largest;
            kinds[i] = survey.kind;
            for (int m = 0; m < kMaxima<T>; m++)
                store(maxima[i] + m * lanes, kinds[i] == Kind::kFinite ? survey.maxima[m] - largest[i] : Vec<T>{});
        }
        Start<T> start{}, other{};
        turn(rows, kGroups<T>, columns);
        with_rules<T>(e.in_lanes(r, count), e.shared, &start, &other, 1, [&](auto rule, Start<T>* out) {
            for (int j = 0; j < kGroups<T>; j++) x[j] = rule.at(columns[j]);
            newton_of_rows(rule, x, y, kGroups<T>, kBoundSteps);
            *out = rule.reached();
        });
        for (int i = 0; i < count; i++) work(r + i, z.row(r + i, narrow), largest[i], kinds[i], all(start[i]));
    }
}

}  // namespace tamis
