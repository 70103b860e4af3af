// alpha-entmax as rules: how one score becomes a weight, and how far Newton's next step goes.  e = alpha - 1, d = score
// - largest.
//
//     threshold   p = [e d + t]_+ ^ (1/e)
//       Squares     alpha = 1.5             x = d / 2 + t       p = x^2
//       Identity    alpha = 2               x = d + t           p = x
//       Powers      1.125 <= alpha <= 2     x = d + t / e       p = (e x)^(1/e)
//     relative    p / p_max = exp(log1p(w) / e), w = e d exp(e theta), theta = -ln p_max: nothing cancels as alpha -> 1
//       Relative    1 <= alpha < 1.125
//
// Threshold rules keep x itself, and steps act on it, so that what is left of x near the edge of the support is exact.
// Steps are Newton's on a norm of the weights, which is convex in the unknown: from a start where there is too much
// weight they never pass the solution.  docs/mathematics.md derives both.
//
// Lanes are independent in every function here, so the same rule serves columns of one row and rows side by side.
#pragma once

#include "elementary.h"

namespace tamis {

// Where the relative form takes over.
template <class T>
constexpr T kNearOne = T(0.125);

// The unknown of a row as rules hand it on: theta for the relative form, for the others how far the threshold lies below
// the largest score.
template <class T>
using Start = Vec<T>;

template <class T>
struct Threshold {
    using V = Vec<T>;
    using Number = T;
    static constexpr bool kShifts = true;
    V unit, top, fallen{};  // of the largest score, x was top at the start, and fell

    Threshold(V unit, V top) : unit(unit), top(top) {}
    V at(V d) const { return d * unit + top; }
    V mass(V total) const { return total; }
    V lowest() const { return top * (-8 * kEps<T>); }
    V fall(V down) {
        fallen += down;
        return down;
    }
    void begin(Start<T> start) { top = start * unit; }
    Start<T> reached() const { return (top - fallen) / unit; }

    // What it takes to compute the weights of the row once more.
    V state() const { return top; }
    V rest() const { return fallen; }
    void resume(V state, V rest) { top = state, fallen = rest; }
    V again(V d) const { return at(d) - fallen; }
    V distance(V x) const { return ((x + fallen) - top) / unit; }
};

template <class T>
struct Squares : Threshold<T> {
    using V = Vec<T>;
    static constexpr bool kKeepsWeights = false;  // cheaper to compute once more than to keep

    explicit Squares(V) : Threshold<T>(all(T(0.5)), all(T(1))) {}
    V weight(V x, V& slope) const {
        slope = max(x, V{});
        return slope * slope;
    }
    V step(V mass, V, V slope, Bits<T> active) {
        return this->fall(choose(active, (mass - sqrt(mass)) / slope, V{}));
    }
};

template <class T>
struct Identity : Threshold<T> {
    using V = Vec<T>;
    static constexpr bool kKeepsWeights = false;

    explicit Identity(V) : Threshold<T>(all(T(1)), all(T(1))) {}
    V weight(V x, V& slope) const {
        slope = choose(x > T(0), all(T(1)), V{});
        return max(x, V{});
    }
    V step(V mass, V, V slope, Bits<T> active) {
        return this->fall(choose(active, (mass - T(1)) / slope, V{}));
    }
};

template <class T>
struct Powers : Threshold<T> {
    using V = Vec<T>;
    static constexpr bool kKeepsWeights = true;
    V e, less;  // less = 1/e - 1

    explicit Powers(V e) : Threshold<T>(all(T(1)), T(1) / e), e(e), less(T(1) / e - T(1)) {}
    V weight(V x, V& slope) const {
        const V y = x * e;
        const auto in = y > std::numeric_limits<T>::min();
        const V live = choose(in, y, all(T(1)));  // hidden scores may be -inf, and 0 times that is no number
        slope = choose(in, exp2(log2(live) * less), V{});
        return slope * live;
    }
    V step(V mass, V, V slope, Bits<T> active) {
        const V power = log2(mass) * (T(1) - e);  // (S - S^(1 - e)) / (e slope)
        return this->fall(choose(active, (mass - exp2(power)) / (slope * e), V{}));
    }
};

template <class T>
struct Relative {
    using V = Vec<T>;
    using Number = T;
    static constexpr bool kShifts = false;
    static constexpr bool kKeepsWeights = true;
    V e, inverse, least, theta{}, factor;

    explicit Relative(V given) : e(max(given, all(T(1e-20)))), inverse(T(1) / e), factor(e) {
        least = max(expm1(e * T(kSmallestLog2<T> * kLn2)), all(4 * kEps<T> - T(1)));
    }
    V at(V d) const { return d; }
    V weight(V d, V& slope) const {
        const V w = max(d * factor, least);
        const V ratio = choose(w > least, exp2_normal(log2_1p_below(w) * inverse), V{});
        slope = ratio / (w + T(1));
        return ratio;
    }
    V mass(V total) const { return total * exp(-theta); }
    V lowest() const { return least / factor * (1 + 8 * kEps<T>); }
    V step(V, V total, V slope, Bits<T> active) {
        const V log_mass = log(total) - theta;
        const V further = log1p(expm1(log_mass * -e) * (total / slope)) * inverse;
        begin(choose(active, theta - further, theta));
        return V{};
    }
    void begin(Start<T> start) {
        theta = start;
        factor = e * exp(theta * e);
    }
    Start<T> reached() const { return theta; }

    V state() const { return theta; }
    V rest() const { return V{}; }
    void resume(V state, V) { begin(state); }
    V again(V d) const { return d; }
    V distance(V x) const { return x; }
};

// Ends Newton's loop for each lane by itself: when its mass is one to rounding, or has come no closer.
template <class T>
struct Progress {
    Vec<T> least = all(kInf<T>);
    Bits<T> wanted(Vec<T> mass) {
        const Vec<T> off = max(mass - T(1), T(1) - mass);
        const Bits<T> go_on = (off > 4 * kEps<T>) & (off < least);
        least = min(off, least);
        return go_on;
    }
};

}  // namespace tamis
