// Attention of a few queries to the keys of one head, for decoding: what is there once, and read again at every step.
//
// Keys lie across, (head_dim, room), and values as they come, (room, width of whole vectors).  Weights that are exactly zero
// for all queries cost nothing beyond their scores.
#pragma once

#include <algorithm>

#include "rows.h"

namespace tamis {

enum class Weights : int32_t { kSoftmax = 0, kEntmax = 1, kRelu = 2 };

// How scores become weights.
struct Rectifier {
    Weights kind;
    float bias;                  // of relu
    const float* exponents;      // of entmax: alpha - 1 of each head
    int32_t per_count;           // of relu: weights over the number of visible keys
};

constexpr int kQueries = 6;
constexpr int kWide = kBytes == 64 ? 4 : 2;  // vectors of values at a time

TAMIS_INLINE int64_t whole_vectors(int64_t count) { return (count + kLanes<float> - 1) / kLanes<float> * kLanes<float>; }

// One row of scores to weights, in place; `visible` counts its keys.
inline void weigh(const Rectifier& rule, int64_t head, float* scores, int64_t n, int64_t visible) {
    if (rule.kind == Weights::kRelu) {
        const float share = rule.per_count ? 1.0f / float(std::max<int64_t>(visible, 1)) : 1.0f;
        for (int64_t j = 0; j < whole_vectors(n); j += kLanes<float>) {
            const FloatVec x = load(scores + j) + rule.bias;
            store(scores + j, choose(x <= 0.0f, FloatVec{}, x) * share);
        }
        return;
    }
    const Survey<float> survey(scores, n);
    if (survey.kind != Kind::kFinite) {
        float each = survey.kind == Kind::kNan ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
        if (survey.kind == Kind::kInfinite) each = 1.0f / float(std::count(scores, scores + n, kInf<float>));
        for (int64_t j = 0; j < n; j++) scores[j] = survey.kind == Kind::kInfinite && scores[j] != kInf<float> ? 0.0f : each;
        return;
    }
    const float e = rule.kind == Weights::kSoftmax ? 0.0f : rule.exponents[head];
    if (e == 0.0f) {
        FloatVec total{};
        for (int64_t j = 0; j < n; j += kLanes<float>) {
            const int count = int(std::min<int64_t>(kLanes<float>, n - j));
            const FloatVec x = count < kLanes<float> ? load_some(scores + j, count, -kInf<float>) : load(scores + j);
            const FloatVec p = exp(max(x - survey.largest, all(-100.0f)));
            total += p;
            store(scores + j, p);
        }
        const FloatVec share = all(1.0f / sum<float>(total));
        for (int64_t j = 0; j < n; j += kLanes<float>) store(scores + j, load(scores + j) * share);
        return;
    }
    thread_local Row<float> row;
    with_rule<float>(e, [&](auto solver) {
        if (n > kGroups<float>) solver.begin(survey.bound(solver));
        row.solve(solver, scores, n, survey.largest);
    });
    row.put_back(scores, n);
}

// What a few queries of one head read.
struct Keys {
    const float* keys;     // (head_dim, room)
    const float* values;   // (room, whole_vectors(head_dim))
    int64_t room, count;   // of places, and of those that are used: the first ones
    const float* hidden;   // (queries, hidden_stride) 0, or -inf where a query must not look; null: it sees all
    int64_t hidden_stride;
    const float* places;   // positions of the keys, for the slope; null: no slope
};

template <int Rows>
inline void scores_of(const float* q, int64_t head_dim, const Keys& of, float* scores, int64_t stride) {
    for (int64_t j = 0; j < of.count; j += 2 * kLanes<float>) {
        FloatVec sums[Rows][2] = {};
        for (int64_t d = 0; d < head_dim; d++) {
            const FloatVec a = load(of.keys + d * of.room + j), b = load(of.keys + d * of.room + j + kLanes<float>);
            for (int r = 0; r < Rows; r++) {
                const FloatVec x = all(q[r * head_dim + d]);
                sums[r][0] += x * a;
                sums[r][1] += x * b;
            }
        }
        for (int r = 0; r < Rows; r++) std::memcpy(scores + r * stride + j, sums[r], 2 * kBytes);
    }
}

template <int Rows, int Vectors>
inline void mix(const float* p, int64_t stride, const int32_t* live, int64_t count, const float* values, int64_t width,
                float* const* out, int64_t at, int64_t head_dim) {
    FloatVec sums[Rows][Vectors] = {};
    for (int64_t i = 0; i < count; i++) {
        const int64_t j = live[i];
        FloatVec v[Vectors];
        for (int k = 0; k < Vectors; k++) v[k] = load(values + j * width + at + k * kLanes<float>);
        for (int r = 0; r < Rows; r++) {
            const FloatVec weight = all(p[r * stride + j]);
            for (int k = 0; k < Vectors; k++) sums[r][k] += weight * v[k];
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int k = 0; k < Vectors; k++) {
            const int64_t d = at + k * kLanes<float>;
            const int left = int(std::min<int64_t>(kLanes<float>, head_dim - d));
            store_some(out[r] + d, sums[r][k], left);
        }
}

// Rows of q (Rows, head_dim) side by side and scaled; `now` is where they stand.  Needs room for scores.
template <int Rows>
inline void attend_rows(const float* q, int64_t head_dim, int64_t head, const Keys& of, const Rectifier& rule, float slope,
                        const float* now, float* scores, int32_t* live, float* const* out) {
    const int64_t stride = (of.count + 2 * kLanes<float> - 1) / (2 * kLanes<float>) * (2 * kLanes<float>);
    scores_of<Rows>(q, head_dim, of, scores, stride);
    for (int r = 0; r < Rows; r++) {
        float* row = scores + r * stride;
        int64_t visible = of.count;
        if (slope != 0.0f)
            for (int64_t j = 0; j < of.count; j++) row[j] -= slope * std::fabs(now[r] - of.places[j]);
        if (of.hidden) {
            const float* hidden = of.hidden + r * of.hidden_stride;
            for (int64_t j = 0; j < of.count; j++) row[j] = hidden[j] == 0.0f ? row[j] : -kInf<float>;
            if (rule.per_count) visible = std::count(hidden, hidden + of.count, 0.0f);
        }
        weigh(rule, head, row, of.count, visible);
    }
    int64_t count = 0;
    for (int64_t j = 0; j < of.count; j++) {
        bool any = false;
        for (int r = 0; r < Rows; r++) any |= scores[r * stride + j] != 0.0f;
        live[count] = int32_t(j);
        count += any;
    }
    const int64_t width = whole_vectors(head_dim);
    int64_t d = 0;
    for (; d + kWide * kLanes<float> <= width; d += kWide * kLanes<float>)
        mix<Rows, kWide>(scores, stride, live, count, of.values, width, out, d, head_dim);
    for (; d < width; d += kLanes<float>) mix<Rows, 1>(scores, stride, live, count, of.values, width, out, d, head_dim);
}

// Room that a thread needs to attend.
struct AttentionRoom {
    Scratch<float> queries, scores;
    Scratch<int32_t> live;
};

// Queries of one head, row r at q + r * q_stride, to out + r * out_stride.  `now` has a position for each, or is null.
inline void attend(const float* q, int64_t q_stride, int64_t queries, int64_t head_dim, int64_t head, const Keys& keys,
                   const Rectifier& rule, float slope, const float* now, float* out, int64_t out_stride, AttentionRoom& room) {
    const float scale = 1.0f / std::sqrt(float(head_dim));
    float* scaled = room.queries.take(kQueries * head_dim);
    float* scores = room.scores.take(kQueries * (keys.count + 2 * kLanes<float>));
    int32_t* live = room.live.take(keys.count + 1);
    for (int64_t first = 0; first < queries; first += kQueries) {
        const int here = int(std::min<int64_t>(kQueries, queries - first));
        float* to[kQueries];
        for (int r = 0; r < here; r++) {
            to[r] = out + (first + r) * out_stride;
            for (int64_t d = 0; d < head_dim; d++) scaled[r * head_dim + d] = q[(first + r) * q_stride + d] * scale;
        }
        Keys of = keys;
        if (of.hidden) of.hidden += first * of.hidden_stride;
        const float* at = now ? now + first : nullptr;
        const auto run = [&](auto rows) {
            attend_rows<decltype(rows)::value>(scaled, head_dim, head, of, rule, slope, at, scores, live, to);
        };
        switch (here) {
            case 1: run(std::integral_constant<int, 1>{}); break;
            case 2: run(std::integral_constant<int, 2>{}); break;
            case 3: run(std::integral_constant<int, 3>{}); break;
            case 4: run(std::integral_constant<int, 4>{}); break;
            case 5: run(std::integral_constant<int, 5>{}); break;
            default: run(std::integral_constant<int, 6>{}); break;
        }
    }
}

}  // namespace tamis
