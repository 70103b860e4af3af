// Rows of scores to weights on their support.  Rows of one alpha are solved side by side, a row in each lane, as far as
// what is left of them is short; no row's result depends on which others are beside it.
#pragma once

#include <algorithm>

#include "attention_tiles.h"
#include "rows.h"

namespace tamis {

// A row that is to be solved, and where its support goes: room for `count` entries and two vectors.
struct Job {
    const float* scores;  // -inf: hidden
    int64_t count;
    int64_t first_key;
    float e;
    int32_t* keys;
    float* weights;
    int64_t found;
};

// Writes the keys and weights that are to be kept side by side.
class Writer {
  public:
    explicit Writer(Job& job) : job_(job), keys_(job.keys), weights_(job.weights) {}
    ~Writer() { job_.found = keys_ - job_.keys; }

    TAMIS_INLINE void write(FloatBits keys, FloatVec weights, FloatBits where) {
        const Lanes lanes = lanes_of(where);
        if (!lanes) return;
        close_gaps(bit_cast<FloatVec>(keys), lanes, reinterpret_cast<float*>(keys_));
        close_gaps(weights, lanes, weights_);
        keys_ += count(lanes);
        weights_ += count(lanes);
    }

  private:
    Job& job_;
    int32_t* keys_;
    float* weights_;
};

TAMIS_INLINE FloatBits counted_from(int64_t first) {
    FloatBits keys;
    for (int i = 0; i < kWide; i++) keys[i] = i;
    return keys + int32_t(first);
}

TAMIS_INLINE FloatVec load_scores(const Job& job, int64_t j) {
    return job.count - j < kWide ? load_some(job.scores + j, int(job.count - j), -kInf<float>) : load(job.scores + j);
}

// Weights that need no look at other scores.  `weigh` gives the weight of a score and where it is kept.
template <class Weigh>
TAMIS_INLINE void weigh_each(Job& job, Weigh weigh) {
    Writer writer(job);
    for (int64_t j = 0; j < job.count; j += kWide) {
        FloatBits kept;
        const FloatVec weights = weigh(load_scores(job, j), kept);
        if (job.count - j < kWide) kept &= counted_from(0) < int32_t(job.count - j);
        writer.write(counted_from(job.first_key + j), weights, kept);
    }
}

// How many there are, and all of them with zeros between them.
template <class Weigh>
TAMIS_INLINE int64_t count_each(const Job& job, Weigh weigh) {
    int64_t found = 0;
    for (int64_t j = 0; j < job.count; j += kWide) {
        FloatBits kept;
        weigh(load_scores(job, j), kept);
        Lanes lanes = lanes_of(kept);
        if (job.count - j < kWide) lanes &= Lanes((1u << (job.count - j)) - 1);
        found += tamis::count(lanes);
    }
    return found;
}

template <class Weigh>
TAMIS_INLINE void weigh_all(const Job& job, float* to, Weigh weigh) {
    for (int64_t j = 0; j < job.count; j += kWide) {
        FloatBits kept;
        FloatVec weights = weigh(load_scores(job, j), kept);
        weights = choose(kept, weights, FloatVec{});
        if (job.count - j < kWide)
            store_some(to + j, weights, int(job.count - j));
        else
            store(to + j, weights);
    }
}

inline void weigh_strange(Job& job, Kind kind) {
    float each = std::numeric_limits<float>::quiet_NaN();
    if (kind == Kind::kInfinite) each = 1.0f / float(std::count(job.scores, job.scores + job.count, kInf<float>));
    weigh_each(job, [&](FloatVec z, FloatBits& kept) TAMIS_LAMBDA {
        kept = kind == Kind::kNan ? ~(z == -kInf<float>) : z == kInf<float>;
        return all(each);
    });
    if (kind == Kind::kEmpty) job.found = 0;
}

class Solver {
  public:
    // Solve entmax rows.
    void solve(Job* jobs, int64_t count) {
        int64_t most = 0;
        for (int64_t i = 0; i < count; i++) most = std::max(most, jobs[i].count);
        distance_ = rounded_up(std::max(most, kShort), kWide) + 2 * kWide;
        scores_.take(kWide * distance_);
        keys_.take(kWide * distance_);
        weights_.take(kWide * distance_);
        int waiting = 0;
        for (int64_t i = 0; i < count; i++) {
            if (waiting > 0 && waiting_[0]->e != jobs[i].e) flush(waiting), waiting = 0;
            Survey<float> survey(jobs[i].scores, jobs[i].count);
            if (survey.kind != Kind::kFinite) {
                weigh_strange(jobs[i], survey.kind);
                continue;
            }
            waiting_[waiting] = jobs + i;
            largest_[waiting] = survey.largest;
            if (jobs[i].count > kShort)
                for (int m = 0; m < kMaxima<float>; m++)
                    store(maxima_[waiting] + m * kWide, survey.maxima[m] - survey.largest);
            if (++waiting == kWide) flush(waiting), waiting = 0;
        }
        flush(waiting);
    }

  private:
    // Rows of up to so many scores, or so many that are left, are solved side by side.
    static constexpr int64_t kShort = 128;

    Job* waiting_[kWide];
    float largest_[kWide];
    alignas(64) float maxima_[kWide][kGroups<float>];
    alignas(64) FloatVec columns_[kShort + kWide], x_[kShort + kWide], y_[kShort + kWide];
    Scratch<float> scores_, weights_;
    Scratch<int32_t> keys_;
    int64_t distance_ = 0, left_[kWide];

    float* scores(int i) { return scores_.take(0) + i * distance_; }
    int32_t* keys(int i) { return keys_.take(0) + i * distance_; }
    float* weights(int i) { return weights_.take(0) + i * distance_; }

    void flush(int count) {
        if (count > 0) with_rule<float>(waiting_[0]->e, [&](auto rule) { solve_together(rule, count); });
    }

    template <class Rule>
    void solve_together(const Rule& fresh, int count) {
        const Start<float> start = begin(fresh, count);
        int64_t longest = 0;
        const float* rows[kWide];
        float* back[kWide];
        for (int i = 0; i < kWide; i++) rows[i] = scores(0);
        for (int i = 0; i < count; i++) {
            keep(fresh, i, start[i]);
            if (left_[i] > kShort) continue;
            longest = std::max(longest, left_[i]);
            rows[i] = scores(i);
        }
        if (longest > 0) {
            const int64_t n = rounded_up(longest, kWide);
            int side_by_side = 0, of[kWide];
            for (int i = 0; i < count; i++)
                if (left_[i] <= kShort) {
                    for (int64_t j = left_[i]; j < n; j++) scores(i)[j] = -kInf<float>;
                    of[side_by_side++] = i;
                }
            for (int i = 0; i < count; i++)
                if (left_[i] > kShort) rows[i] = scores(of[0]);  // whatever: nobody looks
            for (int i = count; i < kWide; i++) rows[i] = scores(of[0]);
            turn(rows, n, columns_);
            Rule rule = fresh;
            rule.begin(start);
            solve_in_lanes(rule, columns_, x_, y_, n);
            for (int i = 0; i < kWide; i++) back[i] = weights(i);
            turn_back(y_, n, back, count);
        }
        for (int i = 0; i < count; i++) {
            float share = 1.0f;
            if (left_[i] > kShort) share = solve_alone(fresh, i, start[i]);
            write(i, share);
        }
    }

    // The unknown from which each row begins: long ones from a bound by the maxima of groups of their scores.
    template <class Rule>
    Start<float> begin(const Rule& fresh, int count) {
        Start<float> start = fresh.reached();
        int long_ones = 0;
        const float* rows[kWide];
        for (int i = 0; i < kWide; i++) rows[i] = nullptr;
        for (int i = 0; i < count; i++)
            if (waiting_[i]->count > kShort) rows[i] = maxima_[i], long_ones++;
        if (long_ones == 0) return start;
        const float* some = nullptr;
        for (int i = 0; i < count; i++)
            if (rows[i]) some = rows[i];
        for (int i = 0; i < kWide; i++)
            if (!rows[i]) rows[i] = some;
        turn(rows, kGroups<float>, columns_);
        Rule rule = fresh;
        for (int j = 0; j < kGroups<float>; j++) x_[j] = rule.at(columns_[j]);
        newton_of_rows(rule, x_, y_, kGroups<float>, kBoundSteps);
        const Start<float> bound = rule.reached();
        for (int i = 0; i < count; i++)
            if (waiting_[i]->count > kShort) start[i] = bound[i];
        return start;
    }

    // The scores that may have weight, relative to the largest, and their keys.
    template <class Rule>
    void keep(Rule rule, int i, float start) {
        const Job& job = *waiting_[i];
        const FloatVec top = all(largest_[i]);
        float* to = scores(i);
        if (job.count <= kShort) {
            for (int64_t j = 0; j < job.count; j += kWide) store(to + j, load_scores(job, j) - top);
            left_[i] = job.count;
            return;
        }
        rule.begin(all(start));
        const FloatVec lowest = rule.lowest();
        int32_t* key = keys(i);
        constexpr int kAtOnce = 4;
        int64_t j = 0;
        for (; j + kAtOnce * kWide <= job.count; j += kAtOnce * kWide) {
            FloatVec here[kAtOnce];
            FloatBits live[kAtOnce];
            for (int m = 0; m < kAtOnce; m++) {
                here[m] = load(job.scores + j + m * kWide) - top;
                live[m] = rule.at(here[m]) > lowest;
            }
            if (!any((live[0] | live[1]) | (live[2] | live[3]))) continue;
            for (int m = 0; m < kAtOnce; m++) {
                const Lanes lanes = lanes_of(live[m]);
                close_gaps(here[m], lanes, to);
                close_gaps(bit_cast<FloatVec>(counted_from(job.first_key + j + m * kWide)), lanes, reinterpret_cast<float*>(key));
                to += tamis::count(lanes);
                key += tamis::count(lanes);
            }
        }
        for (; j < job.count; j += kWide) {
            const FloatVec here = load_scores(job, j) - top;
            const Lanes lanes = lanes_of(rule.at(here) > lowest);
            close_gaps(here, lanes, to);
            close_gaps(bit_cast<FloatVec>(counted_from(job.first_key + j)), lanes, reinterpret_cast<float*>(key));
            to += tamis::count(lanes);
            key += tamis::count(lanes);
        }
        left_[i] = to - scores(i);
    }

    // Leaves unnormalised weights and returns what to multiply them by.
    template <class Rule>
    float solve_alone(Rule rule, int i, float start) {
        float *x = scores(i), *y = weights(i);
        const int64_t count = left_[i];
        store(x + count, all(-kInf<float>));
        rule.begin(all(start));
        for (int64_t j = 0; j < count; j += kWide) store(x + j, rule.at(load(x + j)));
        const float total = newton(rule, x, y, count, kNoLimit);
        if constexpr (!Rule::kKeepsWeights)
            for (int64_t j = 0; j < count; j += kWide) {
                FloatVec unused;
                store(y + j, rule.weight(load(x + j), unused));
            }
        store(y + count, FloatVec{});
        return 1.0f / total;
    }

    void write(int i, float share) {
        Job& job = *waiting_[i];
        Writer writer(job);
        const float* y = weights(i);
        const bool all_left = job.count <= kShort;
        for (int64_t j = 0; j < left_[i]; j += kWide) {
            const FloatVec weight = load(y + j) * share;
            const FloatBits keys = all_left ? counted_from(job.first_key + j) : bit_cast<FloatBits>(load(reinterpret_cast<const float*>(this->keys(i) + j)));
            writer.write(keys, weight, weight > 0.0f);
        }
    }
};

}  // namespace tamis
