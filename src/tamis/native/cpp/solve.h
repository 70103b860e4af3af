// Solving rows: which scores get weight, and how much.
//
// Long rows: (1) maxima of disjoint groups of scores bound the threshold, because the solution over a subset of the
// scores lies on the safe side of the row's; (2) only scores above the bound are kept, side by side; (3) Newton's steps see
// those alone; (4) weights go back to where their scores were.
//
// Newton's loop comes in two forms.  `newton` has columns of one row in the lanes; `newton_of_rows` has a row in each
// lane, which is what short rows and bounds need: a row's own scalar work then costs a lane instead of a vector.
#pragma once

#include <memory>

#include "rules.h"

namespace tamis {

// Memory of a thread that grows and stays, each piece with room for a vector more than was asked for.
template <class T>
class Scratch {
  public:
    T* take(int64_t count) {
        const int64_t wanted = count + 2 * kBytes / int(sizeof(T));
        if (wanted > size_) {
            kept_.reset(new T[size_t(wanted)]);
            size_ = wanted;
        }
        return kept_.get();
    }

  private:
    std::unique_ptr<T[]> kept_;
    int64_t size_ = 0;
};

// Adds up what `weigh` returns for each vector of `count` numbers, and what it leaves in its second argument.  Partial sums
// are short, so that a million weights add up as exactly as a hundred.
template <class T, class Weigh>
TAMIS_INLINE void add_up(int64_t count, T& total, T& slope, Weigh weigh) {
    constexpr int step = kLanes<T>, block = 64 * step;
    double weights = 0, slopes = 0;
    for (int64_t start = 0; start < count; start += block) {
        const int64_t stop = start + block < count ? start + block : count;
        Vec<T> w[2] = {}, s[2] = {};
        int64_t j = start;
        for (; j + step < stop; j += 2 * step) {
            Vec<T> first, second;
            w[0] += weigh(j, first);
            w[1] += weigh(j + step, second);
            s[0] += first;
            s[1] += second;
        }
        if (j < stop) {
            Vec<T> last;
            w[0] += weigh(j, last);
            s[0] += last;
        }
        weights += sum<T>(w[0] + w[1]);
        slopes += sum<T>(s[0] + s[1]);
    }
    total = T(weights);
    slope = T(slopes);
}

constexpr int kNoLimit = std::numeric_limits<int>::max();

// Newton's steps over x (count, and -inf up to a whole vector), in place.  Leaves unnormalised weights in y, if the rule
// keeps them, and returns what they add up to.
template <class Rule, class T = typename Rule::Number>
TAMIS_INLINE T newton(Rule& rule, T* x, T* y, int64_t count, int most) {
    Progress<T> progress;
    Vec<T> down{};
    for (int done = 0;; done++) {
        T total, slope;
        add_up<T>(count, total, slope, [&](int64_t j, Vec<T>& s) TAMIS_LAMBDA {
            Vec<T> at = load(x + j);
            if constexpr (Rule::kShifts) {
                at -= down;
                store(x + j, at);
            }
            const Vec<T> weight = rule.weight(at, s);
            if constexpr (Rule::kKeepsWeights) store(y + j, weight);
            return weight;
        });
        const Vec<T> mass = rule.mass(all(total));
        if (done == most || !any(progress.wanted(mass))) return total;
        down = rule.step(mass, all(total), all(slope), all(T(0)) == all(T(0)));
    }
}

// The same with a row in each lane: x (n) holds a score of each, y (n) their weights.
template <class Rule, class T = typename Rule::Number>
TAMIS_INLINE Vec<T> newton_of_rows(Rule& rule, Vec<T>* x, Vec<T>* y, int64_t n, int most) {
    Progress<T> progress;
    Vec<T> down{};
    for (int done = 0;; done++) {
        Vec<T> w[4] = {}, s[4] = {};
        auto add = [&](int64_t j, int i) TAMIS_LAMBDA {
            if constexpr (Rule::kShifts) x[j] -= down;
            Vec<T> slope;
            const Vec<T> weight = rule.weight(x[j], slope);
            if constexpr (Rule::kKeepsWeights) y[j] = weight;
            w[i] += weight;
            s[i] += slope;
        };
        int64_t j = 0;
        for (; j + 4 <= n; j += 4)
            for (int i = 0; i < 4; i++) add(j + i, i);
        for (; j < n; j++) add(j, 0);
        const Vec<T> total = (w[0] + w[1]) + (w[2] + w[3]);
        const Vec<T> mass = rule.mass(total);
        const Bits<T> wanted = progress.wanted(mass);
        if (done == most || !any(wanted)) return total;
        down = rule.step(mass, total, (s[0] + s[1]) + (s[2] + s[3]), wanted);
    }
}

// Rows in lanes, solved: d (n) is relative to the largest of its row, y (n) becomes the weights.
template <class Rule, class T = typename Rule::Number>
TAMIS_INLINE void solve_in_lanes(Rule rule, const Vec<T>* d, Vec<T>* x, Vec<T>* y, int64_t n) {
    for (int64_t j = 0; j < n; j++) x[j] = rule.at(d[j]);
    const Vec<T> share = T(1) / newton_of_rows(rule, x, y, n, kNoLimit);
    for (int64_t j = 0; j < n; j++) {
        Vec<T> slope;
        y[j] = (Rule::kKeepsWeights ? y[j] : rule.weight(x[j], slope)) * share;
    }
}

enum class Kind { kFinite, kEmpty, kInfinite, kNan };  // of a row: by its largest score, or by a score that is no number

// Maxima of so many groups of scores, a group to a lane of so many vectors, bound the threshold of a row.
template <class T>
constexpr int kGroups = 64 * 4 / int(sizeof(T));
template <class T>
constexpr int kMaxima = kGroups<T> / kLanes<T>;
// Newton's steps on them; any number will do, and more cost more than they spare.
constexpr int kBoundSteps = 2;

template <class T>
struct Survey {
    Vec<T> maxima[kMaxima<T>];
    T largest;
    Kind kind;

    TAMIS_INLINE Survey(const T* z, int64_t n) {
        for (int i = 0; i < kMaxima<T>; i++) maxima[i] = all(-kInf<T>);
        Bits<T> strange{};
        int64_t j = 0;
        for (; j + kGroups<T> <= n; j += kGroups<T>)
            for (int i = 0; i < kMaxima<T>; i++) {
                const Vec<T> scores = load(z + j + i * kLanes<T>);
                strange |= scores != scores;
                maxima[i] = max(scores, maxima[i]);
            }
        for (int i = 0; j < n; j += kLanes<T>, i++) {
            const Vec<T> scores = n - j < kLanes<T> ? load_some(z + j, int(n - j), -kInf<T>) : load(z + j);
            strange |= scores != scores;
            maxima[i] = max(scores, maxima[i]);
        }
        Vec<T> top = maxima[0];
        for (int i = 1; i < kMaxima<T>; i++) top = max(maxima[i], top);
        largest = tamis::largest<T>(top);
        kind = any(strange) ? Kind::kNan
               : largest == kInf<T> ? Kind::kInfinite
               : largest == -kInf<T> ? Kind::kEmpty
                                     : Kind::kFinite;
    }

    // Where to begin with a finite row.
    template <class Rule>
    TAMIS_INLINE Start<T> bound(Rule rule) const {
        T x[kGroups<T>], y[kGroups<T>];
        for (int i = 0; i < kMaxima<T>; i++) store(x + i * kLanes<T>, rule.at(maxima[i] - largest));
        newton(rule, x, y, kGroups<T>, kBoundSteps);
        return rule.reached();
    }
};

// Numbers that are passed over together where none of them is kept: four vectors, whose lanes fill a word.
template <class T>
constexpr int kAtOnce = 4 * kLanes<T>;

TAMIS_INLINE bool none_of(const Lanes* lanes) {
    uint64_t word;
    std::memcpy(&word, lanes, sizeof word);
    return word == 0;
}

// Writes the lanes of four vectors, and returns whether there are any.  By one store: loads wait for several.
TAMIS_INLINE bool note(Lanes* lanes, const Lanes* found) {
    uint64_t word = 0;
    for (int i = 0; i < 4; i++) word |= uint64_t(found[i]) << (16 * i);
    std::memcpy(lanes, &word, sizeof word);  // the first lies lowest, as everywhere that this is compiled for
    return word != 0;
}

// What was kept of a row, times `factor`, to where it came from; zeros elsewhere.
template <class T>
TAMIS_INLINE void put_back(const T* from, const Lanes* kept, Vec<T> factor, T* to, int64_t n) {
    int64_t j = 0;
    for (; j + kAtOnce<T> <= n; j += kAtOnce<T>, kept += 4) {
        if (none_of(kept)) {
            for (int i = 0; i < 4; i++) store(to + j + i * kLanes<T>, Vec<T>{});
            continue;
        }
        for (int i = 0; i < 4; i++) {
            store(to + j + i * kLanes<T>, open_gaps(from, kept[i]) * factor);
            from += count(kept[i]);
        }
    }
    for (; j < n; j += kLanes<T>, kept++) {
        const Vec<T> numbers = open_gaps(from, *kept) * factor;
        from += count(*kept);
        if (n - j < kLanes<T>)
            store_some(to + j, numbers, int(n - j));
        else
            store(to + j, numbers);
    }
}

// The scores of a row that may have weight, and their weights.
template <class T>
struct Row {
    T* x = nullptr;           // scores that were kept, as the rule sees them
    T* y = nullptr;           // their weights, not normalised
    Lanes* kept = nullptr;    // which they are, for each vector of the row
    int64_t count = 0;
    T total = 0;              // of the weights

    // Solve a finite row.
    template <class Rule>
    TAMIS_INLINE void solve(Rule& rule, const T* z, int64_t n, T largest) {
        keep(rule, z, n, largest);
        total = newton(rule, x, y, count, kNoLimit);
        if constexpr (!Rule::kKeepsWeights)
            for (int64_t j = 0; j < count; j += kLanes<T>) {
                Vec<T> unused;
                store(y + j, rule.weight(load(x + j), unused));
            }
    }

    // The weights, to where their scores were.
    TAMIS_INLINE void put_back(T* p, int64_t n) const { tamis::put_back(y, kept, all(T(1) / total), p, n); }

  private:
    Scratch<T> scores_, weights_;
    Scratch<Lanes> lanes_;

    template <class Rule>
    TAMIS_INLINE void keep(const Rule& rule, const T* z, int64_t n, T largest) {
        x = scores_.take(n);
        y = weights_.take(n);
        kept = lanes_.take(n / kLanes<T> + 4);
        const Vec<T> top = all(largest), lowest = rule.lowest();
        T* to = x;
        Lanes* lanes = kept;
        int64_t j = 0;
        for (; j + kAtOnce<T> <= n; j += kAtOnce<T>, lanes += 4) {
            Vec<T> here[4];
            Lanes found[4];
            for (int i = 0; i < 4; i++) {
                here[i] = rule.at(load(z + j + i * kLanes<T>) - top);
                found[i] = lanes_of(here[i] > lowest);
            }
            if (!note(lanes, found)) continue;
            for (int i = 0; i < 4; i++) {
                close_gaps(here[i], found[i], to);
                to += tamis::count(found[i]);
            }
        }
        for (; j < n; j += kLanes<T>, lanes++) {
            const Vec<T> scores = n - j < kLanes<T> ? load_some(z + j, int(n - j), -kInf<T>) : load(z + j);
            const Vec<T> here = rule.at(scores - top);
            *lanes = lanes_of(here > lowest);
            close_gaps(here, *lanes, to);
            to += tamis::count(*lanes);
        }
        count = to - x;
        store(x + count, all(-kInf<T>));
    }
};

}  // namespace tamis
