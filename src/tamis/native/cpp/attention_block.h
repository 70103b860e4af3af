// A block of query rows that share a key head: which keys each may see, their scores, and the weights on their support.
#pragma once

#include <cmath>
#include <vector>

#include "attention_solve.h"

namespace tamis {

// One query row, and the keys from first to last that it may see.
struct QueryRow {
    int64_t head, query, number;
    int64_t first, last;
    int64_t position;  // of the query
    int64_t origin;    // the key at distance 0, as long as positions of keys are counted
    float e, slope, factor;  // alpha - 1; of ALiBi; of the weights of an activation
};

// The weights of a row: those on its support, or from `dense` on all of row.first to row.last.
struct Weights {
    Support support;
    float* dense = nullptr;
    int64_t count = 0;  // of the support, either way
};

// Drops weights by a counter: which ones depends on the seed and the indices of sequence, head, query and key alone.
class Dropout {
  public:
    explicit Dropout(const Attention& call)
        : seed_(call.seed), head_(call.first_head), query_(call.first_query), keep_(float(1.0 / (1.0 - call.dropout))),
          p_(call.dropout), limit_(uint32_t(std::min(call.dropout * 0x1p32, 4294967295.0))) {}

    bool is_on() const { return p_ > 0; }
    void begin(int64_t b, int64_t h, int64_t i) {
        uint64_t x = mixed(seed_ + 0x9e3779b97f4a7c15ull);
        x = mixed(x ^ uint64_t(b) * 0xbf58476d1ce4e5b9ull);
        x = mixed(x ^ uint64_t(head_ + h) * 0x94d049bb133111ebull);
        x = mixed(x ^ uint64_t(query_ + i) * 0xd6e8feb86659fd93ull);
        low_ = uint32_t(x), high_ = uint32_t(x >> 32);
    }
    // 0, or what makes up for those dropped.
    float factor(int64_t key) const {
        if (p_ >= 1) return 0;
        uint32_t x = uint32_t(key) * 0x9e3779b9u + low_;
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15) * 0x846ca68bu;
        x = (x ^ x >> 16) + high_;
        x = (x ^ x >> 17) * 0xed5ad4bbu;
        x = (x ^ x >> 11) * 0xac4c1b51u;
        x ^= x >> 15;
        return x < limit_ ? 0.0f : keep_;
    }

  private:
    uint64_t seed_;
    int64_t head_, query_;
    float keep_;
    double p_;
    uint32_t limit_, low_ = 0, high_ = 0;

    static uint64_t mixed(uint64_t x) {
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ x >> 27) * 0x94d049bb133111ebull;
        return x ^ x >> 31;
    }
};

// The rows of a key head, in the order of its query heads, cut into blocks: by their shape alone.
struct Cut {
    int64_t rows, blocks, size;

    explicit Cut(const Attention& call) : rows(call.groups() * call.queries) {
        constexpr int64_t most = 8 * kTileRows, numbers = 1 << 16;  // of scores, which are to stay in the cache
        const int64_t fitting = numbers / std::max<int64_t>(call.keys, 1) / kTileRows * kTileRows;
        const int64_t wanted = std::clamp<int64_t>(fitting, 2 * kTileRows, most);
        blocks = (rows + wanted - 1) / wanted;
        size = rounded_up((rows + blocks - 1) / std::max<int64_t>(blocks, 1), kTileRows);
        blocks = (rows + size - 1) / std::max<int64_t>(size, 1);
    }
};

// Queries of a key head up to which their products with keys are taken one by one.
constexpr int64_t kFew = 2;

// Share of weights above which a row is multiplied with its zeros.
constexpr double kCrowded = 0.42;

class Block {
  public:
    std::vector<QueryRow> rows;
    std::vector<Weights> weights;

    // Keys and values of another head.
    void begin(const Attention& call, int64_t b, int64_t key_head, bool keep_panels) {
        call_ = &call, batch_ = b, key_head_ = key_head;
        keys.begin(call, call.key, call.key_step, call.dim, b, key_head, keep_panels);
        values.begin(call, call.value, 1, call.value_dim, b, key_head, keep_panels);
        finite_ = Finite::kUnknown;
        reaches_ = call.slopes && !call.mask && !call.key_positions && call.key_step == 1 &&
                   (call.rule == kRelu || call.rule == kSquaredRelu || call.rule == kEntmax);
        longest_ = reaches_ ? std::sqrt(keys.longest(0, keys.count())) * (1 + 1e-5f) : 0;
    }

    Rows keys, values;

    // Rows number first to last of those that share the key head.
    void take(int64_t first, int64_t last) {
        const Attention& call = *call_;
        rows.clear();
        scaled_ = query_room_.take((last - first) * call.dim);
        for (int64_t r = first; r < last; r++) {
            const int64_t head = key_head_ * call.groups() + r / call.queries, i = r % call.queries;
            rows.push_back(place(head, i));
            const float* from = call.query.at(batch_, head, i);
            float* to = scaled_ + (r - first) * call.dim;
            for (int64_t d = 0; d < call.dim; d += kWide) store(to + d, load(from + d) * float(call.scale));
            if (reaches_) narrow(rows.back(), to);
        }
        begin_ = call.keys, end_ = 0;
        for (const QueryRow& row : rows)
            if (row.first < row.last) begin_ = std::min(begin_, row.first), end_ = std::max(end_, row.last);
        if (end_ < begin_) begin_ = end_ = 0;
        begin_ = begin_ / kPanel * kPanel;
        width_ = rounded_up(end_ - begin_, kPanel);
    }

    const float* query(int64_t r) const { return scaled_ + r * call_->dim; }  // times the scale
    int64_t begin_key() const { return begin_; }
    int64_t width() const { return width_; }

    // Scores of all rows, and what comes of them.  Weights stay until the next call.
    void solve() {
        score();
        const Attention& call = *call_;
        jobs_.clear();
        int64_t room = 0;
        for (const QueryRow& row : rows) room += std::max<int64_t>(row.last - row.first, 0) + 2 * kWide;
        int32_t* key = key_room_.take(room);
        float* weight = weight_room_.take(room);
        for (int64_t r = 0; r < int64_t(rows.size()); r++) {
            const QueryRow& row = rows[size_t(r)];
            const int64_t count = std::max<int64_t>(row.last - row.first, 0);
            float* z = scores_ + r * width_ + (row.first - begin_);
            if (count > 0) dress(row, z);
            jobs_.push_back({z, count, row.first, row.e, key, weight, 0});
            key += count + 2 * kWide;
            weight += count + 2 * kWide;
        }
        weights.assign(rows.size(), {});
        reserve_dense();
        if (call.rule == kEntmax) solver_.solve(jobs_.data(), int64_t(jobs_.size()));
        for (size_t r = 0; r < rows.size(); r++) {
            if (call.rule == kEntmax)
                spread(r);
            else
                activate(r);
            weights[r].count = jobs_[r].found;
            if (!weights[r].dense) weights[r].support = {jobs_[r].keys, jobs_[r].weights, jobs_[r].found};
        }
    }

    // The weights of the block, from where the forward pass kept them if it did.
    void fetch() {
        for (const QueryRow& row : rows)
            if (call_->places[row.number] < 0) return solve();
        weights.assign(rows.size(), {});
        reserve_dense();
        for (size_t r = 0; r < rows.size(); r++) {
            const QueryRow& row = rows[r];
            const int64_t count = call_->counts[row.number];
            const int32_t* from = call_->kept + call_->places[row.number];
            weights[r].count = count >= 0 ? count : -1 - count;
            if (count >= 0) {
                weights[r].support = {from, reinterpret_cast<const float*>(from + count), count};
                continue;
            }
            float* to = dense_room(int64_t(r));
            std::fill(to, to + width(), 0.0f);
            to += row.first - begin_key();
            std::memcpy(to, from, size_t(row.last - row.first) * 4);
            weights[r].dense = to;
        }
    }

    // The support of a row, whichever way its weights are held.
    Support support(size_t r) {
        const Weights& held = weights[r];
        if (!held.dense) return held.support;
        const QueryRow& row = rows[r];
        const int64_t count = row.last - row.first;
        int32_t* keys = listed_keys_.take(count);
        float* kept = listed_.take(count);
        int64_t found = 0;
        for (int64_t j = 0; j < count; j++) {
            if (held.dense[j] == 0 && call_->rule != kLeakyRelu) continue;
            keys[found] = int32_t(row.first + j);
            kept[found++] = held.dense[j];
        }
        return {keys, kept, found};
    }

    // Whether the rows of a dense product are numbers all through.
    static bool is_finite(const float* row, int64_t dim) {
        FloatVec sums{};
        for (int64_t d = 0; d < dim; d += kWide) sums += load(row + d) * 0.0f;
        return sum<float>(sums) == 0.0f;
    }

    // The weights of dense rows with zeros around them, (rows.size(), width()): for products over all keys of the block.
    float* dense_room(int64_t r) { return dense_ + r * width_; }
    float* reserve_dense() { return dense_ = dense_room_.take(int64_t(rows.size()) * width_); }

  private:
    const Attention* call_ = nullptr;
    int64_t batch_ = 0, key_head_ = 0, begin_ = 0, end_ = 0, width_ = 0;
    enum class Finite { kUnknown, kNo, kYes } finite_ = Finite::kUnknown;  // keys and values
    bool reaches_ = false;
    float longest_ = 0;
    float *scaled_ = nullptr, *scores_ = nullptr, *dense_ = nullptr;
    Scratch<float> query_room_, score_room_, weight_room_, dense_room_, listed_;
    Scratch<int32_t> key_room_, listed_keys_;
    std::vector<Job> jobs_;
    Solver solver_;

    QueryRow place(int64_t head, int64_t i) const {
        const Attention& call = *call_;
        QueryRow row{head, i, call.row_number(batch_, head, i), 0, call.keys, 0, 0, 0, 0, 1};
        int64_t own = call.keys - call.queries + i, start = 0;  // its place among the keys of its own sequence
        if (call.cu_queries) {
            const int64_t* after = std::upper_bound(call.cu_queries, call.cu_queries + call.segments + 1, i);
            const int64_t segment = after - call.cu_queries - 1;
            if (segment < 0 || segment >= call.segments) {
                row.last = 0;
                return row;
            }
            // Within the keys, whatever these are: a compiled call cannot check them before.
            start = row.first = std::max<int64_t>(call.cu_keys[segment], 0);
            row.last = std::min(call.cu_keys[segment + 1], call.keys);
            own = i - call.cu_queries[segment] + (row.last - start) - (call.cu_queries[segment + 1] - call.cu_queries[segment]);
        }
        if (call.lengths) row.last = std::min(row.last, call.lengths[batch_]);
        row.position = call.query_positions ? call.query_positions[batch_ * call.query_positions_batch + i] : own;
        if (call.pages && !call.query_positions) row.position = call.lengths[batch_] - call.queries + i;
        row.origin = row.position + start;
        if (!call.key_positions) {
            if (call.left >= 0) row.first = std::max(row.first, row.origin - call.left);
            if (call.right >= 0) row.last = std::min(row.last, row.origin + call.right + 1);
        }
        if (row.last <= row.first) row.first = row.last = 0;
        if (call.e.data) row.e = *call.e.at(batch_, head, i);
        if (call.row_scale.data) row.factor = *call.row_scale.at(batch_, head, i);
        if (call.slopes) row.slope = call.slopes[batch_ * call.slopes_batch + head * call.slopes_head];
        return row;
    }

    // Leave out keys that are too far to have a weight, whatever they hold: no content is worth as much as ALiBi takes.
    void narrow(QueryRow& row, const float* query) const {
        if (!(row.slope > 0) || row.first >= row.last) return;
        const auto dot = [&](const float* x) {
            FloatVec sums{};
            for (int64_t d = 0; d < call_->dim; d += kWide) sums += load(query + d) * load(x + d);
            return sum<float>(sums);
        };
        const float most = std::sqrt(dot(query)) * longest_;
        const int64_t near = std::clamp(row.origin, row.first, row.last - 1);
        float needed = float(-call_->bias);  // what a score must exceed
        if (call_->rule == kEntmax) {
            if (!(row.e > 0)) return;
            needed = dot(keys.row(near)) - row.slope * float(std::abs(near - row.origin)) - 1 / row.e;
        }
        const float reach = (most - needed) / row.slope;
        const float margin = 1e-4f * (most + std::abs(needed)) / row.slope + 2;
        if (!(reach + margin < 1e15f)) return;
        const int64_t far = int64_t(std::max(reach + margin, 0.0f)) + 1;
        row.first = std::max(row.first, row.origin - far);
        row.last = std::min(row.last, row.origin + far + 1);
        if (row.last <= row.first) row.first = row.last = 0;
    }

    void score() {
        const int64_t count = int64_t(rows.size());
        scores_ = score_room_.take(count * width_ + 2 * kWide);
        if (call_->groups() * call_->queries <= kFew && call_->key_step == 1) {
            for (int64_t r = 0; r < count; r++)
                with_vectors(call_->dim, [&](auto n) {
                    const QueryRow& row = rows[size_t(r)];
                    project_all<decltype(n)::value>(keys, row.first, row.last, query(r), call_->dim,
                                                    scores_ + r * width_ + (row.first - begin_));
                });
            return;
        }
        const float* from[8 * kTileRows];
        float* to[8 * kTileRows];
        for (int64_t j = 0; j < width_; j += kPanel) {
            int64_t ldb;
            const float* panel = keys.panel((begin_ + j) / kPanel, ldb);
            int64_t some = 0;  // rows that see any of these keys
            for (int64_t r = 0; r < count; r++) {
                if (rows[size_t(r)].last <= begin_ + j || rows[size_t(r)].first >= begin_ + j + kPanel) continue;
                from[some] = query(r);
                to[some++] = scores_ + r * width_ + j;
            }
            multiply(some, from, 1, panel, ldb, call_->dim, to, std::min<int64_t>(kPanel, rounded_up(end_ - begin_ - j, kWide)), false);
        }
    }

    // Biases, and -inf where a key is hidden.  z begins at row.first.
    void dress(const QueryRow& row, float* z) const {
        const Attention& call = *call_;
        const int64_t count = row.last - row.first;
        const int64_t* key_positions =
            call.key_positions ? call.key_positions + batch_ * call.key_positions_batch + row.first : nullptr;
        if (call.slopes && row.slope != 0) {
            if (key_positions)
                for (int64_t j = 0; j < count; j++) z[j] -= row.slope * float(std::abs(key_positions[j] - row.position));
            else if (std::abs(row.origin) < 1 << 30)
                for (int64_t j = 0; j < count; j++) z[j] -= row.slope * std::abs(float(int32_t(row.first + j - row.origin)));
            else
                for (int64_t j = 0; j < count; j++) z[j] -= row.slope * float(std::abs(row.first + j - row.origin));
        }
        if (key_positions)
            for (int64_t j = 0; j < count; j++) {
                const int64_t ahead = key_positions[j] - row.position;
                const bool seen = (call.left < 0 || ahead >= -call.left) && (call.right < 0 || ahead <= call.right);
                z[j] = seen ? z[j] : -kInf<float>;
            }
        if (!call.mask) return;
        const int64_t at = batch_ * call.mask_batch + row.head * call.mask_head + row.query * call.mask_row +
                           row.first * call.mask_key;
        const int64_t step = call.mask_key;
        if (call.mask_kind == kBoolean) {
            const uint8_t* seen = static_cast<const uint8_t*>(call.mask) + at;
            if (step == 1)
                for (int64_t j = 0; j < count; j++) z[j] = seen[j] ? z[j] : -kInf<float>;
            else
                for (int64_t j = 0; j < count; j++) z[j] = seen[j * step] ? z[j] : -kInf<float>;
            return;
        }
        const float* bias = static_cast<const float*>(call.mask) + at;
        for (int64_t j = 0; j < count; j++) {
            const float more = bias[j * step];
            z[j] = more == -kInf<float> ? -kInf<float> : z[j] + more;
        }
    }

    // Calls work(weigh), where weigh(score, kept) gives a weight and whether it is on the support.
    template <class Work>
    TAMIS_INLINE void with_activation(const QueryRow& row, Work work) const {
        const FloatVec bias = all(float(call_->bias)), factor = all(row.factor), zero{};
        const float slope = float(call_->slope);
        switch (call_->rule) {
            case kRelu:
                return work([=](FloatVec z, FloatBits& kept) TAMIS_LAMBDA {
                    const FloatVec x = z + bias;
                    kept = ~(x <= zero);  // no number stays one
                    return x * factor;
                });
            case kSquaredRelu:
                return work([=](FloatVec z, FloatBits& kept) TAMIS_LAMBDA {
                    const FloatVec x = z + bias;
                    kept = ~(x <= zero);
                    return x * x * factor;
                });
            default:
                return work([=](FloatVec z, FloatBits& kept) TAMIS_LAMBDA {
                    const FloatVec x = z + bias;
                    kept = ~(z == -kInf<float>);
                    return choose(x > zero, x, x * slope) * factor;
                });
        }
    }

    // A row of few zeros becomes dense.
    void spread(size_t r) {
        const Job& job = jobs_[r];
        if (!is_crowded(job)) return;
        float* to = dense_row(r) - rows[r].first;
        for (int64_t j = 0; j < job.found; j++) to[job.keys[j]] = job.weights[j];
    }

    void activate(size_t r) {
        Job& job = jobs_[r];
        with_activation(rows[r], [&](auto weigh) {
            job.found = count_each(job, weigh);
            if (is_crowded(job))
                weigh_all(job, dense_row(r), weigh);
            else
                weigh_each(job, weigh);
        });
    }

    bool is_crowded(const Job& job) {
        const int64_t least = call_->rule == kLeakyRelu ? job.count - 1 : int64_t(double(job.count) * kCrowded);
        return job.found > least && job.found > 0 && may_be_dense();  // of leaky relu zeros too have a slope
    }

    // Where 0 times something may be no number, zeros are not multiplied.
    bool may_be_dense() {
        if (call_->pages || call_->key_step != 1) return false;
        if (finite_ == Finite::kUnknown)
            finite_ = keys.is_finite(0, call_->keys) && values.is_finite(0, call_->keys) ? Finite::kYes : Finite::kNo;
        return finite_ == Finite::kYes;
    }

    // Zeros, and where the weights of a row go among them.
    float* dense_row(size_t r) {
        float* to = dense_room(int64_t(r));
        std::fill(to, to + width_, 0.0f);
        to += rows[r].first - begin_;
        weights[r].dense = to;
        return to;
    }

};

}  // namespace tamis
