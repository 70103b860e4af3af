// Attention, forward: q k^T alone is dense, the output is a sum over the support of each row.
#include <atomic>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "attention_block.h"
#include "turns.h"

namespace tamis {
namespace {

// Parts into which the rows of a key head are cut, so that there is work for many threads: by the shape alone.
constexpr int64_t kForwardParts = 64;

// Of what each block could keep if all kept as much, so many times as much may one keep.
constexpr int64_t kGenerous = 4;

class Forward {
  public:
    Forward(const Attention& call, std::atomic<int64_t>& kept) : call_(call), kept_(kept), dropout_(call) {}

    void run(int64_t b, int64_t key_head, int64_t first, int64_t last, const Cut& cut) {
        block_.begin(call_, b, key_head, last - first > 1);
        for (int64_t number = first; number < last; number++) {
            block_.take(number * cut.size, std::min(cut.rows, (number + 1) * cut.size));
            block_.solve();
            if (call_.statistics) count(b);
            keep();
            multiply_values(b);
        }
    }

  private:
    const Attention& call_;
    std::atomic<int64_t>& kept_;
    Dropout dropout_;
    Block block_;
    Scratch<float> dropped_;
    std::vector<const float*> from_;
    std::vector<float*> to_;

    void multiply_values(int64_t b) {
        from_.clear();
        to_.clear();
        for (size_t r = 0; r < block_.rows.size(); r++) {
            const QueryRow& row = block_.rows[r];
            const Weights& weights = block_.weights[r];
            float* out = call_.out.at(b, row.head, row.query);
            Support support = weights.support;
            if (dropout_.is_on()) {
                dropout_.begin(b, row.head, row.query);
                float* changed = weights.dense ? weights.dense : dropped_.take(support.count);
                if (weights.dense)
                    for (int64_t j = 0; j < row.last - row.first; j++) changed[j] *= dropout_.factor(row.first + j);
                else
                    for (int64_t j = 0; j < support.count; j++)
                        changed[j] = support.weights[j] * dropout_.factor(support.keys[j]);
                support.weights = changed;
            }
            if (weights.dense) {
                from_.push_back(block_.dense_room(int64_t(r)));
                to_.push_back(out);
                continue;
            }
            gather(support, block_.values, call_.value_dim, out, 1.0f);
        }
        if (from_.empty()) return;
        const int64_t begin = block_.begin_key(), depth = std::min(block_.width(), call_.keys - begin);
        multiply(int64_t(from_.size()), from_.data(), 1, block_.values.row(begin), block_.values.distance(), depth, to_.data(),
                 call_.value_dim, false);
    }

    // Weights as they were found, for the backward pass: all of a block, or none.
    void keep() {
        if (!call_.counts) return;
        int64_t needed = 0;
        for (size_t r = 0; r < block_.rows.size(); r++) {
            const Weights& weights = block_.weights[r];
            const QueryRow& row = block_.rows[r];
            call_.counts[row.number] = int32_t(weights.dense ? -1 - weights.count : weights.count);
            needed += weights.dense ? row.last - row.first : 2 * weights.count;
        }
        if (!call_.places) return;
        int64_t at = call_.capacity;
        // To solve a row again takes as long however many weights it has, so those of few are kept.
        const int64_t all_rows = call_.batches * call_.heads * call_.queries;
        const int64_t most = kGenerous * call_.capacity / all_rows * int64_t(block_.rows.size());
        if (needed <= most) at = kept_.fetch_add(needed);
        const bool fits = at + needed <= call_.capacity;
        for (size_t r = 0; r < block_.rows.size(); r++) {
            const Weights& weights = block_.weights[r];
            const QueryRow& row = block_.rows[r];
            call_.places[row.number] = fits ? at : -1;
            if (!fits) continue;
            if (weights.dense) {
                std::memcpy(call_.kept + at, weights.dense, size_t(row.last - row.first) * 4);
                at += row.last - row.first;
                continue;
            }
            const size_t bytes = size_t(weights.support.count) * 4;
            if (bytes) {
                std::memcpy(call_.kept + at, weights.support.keys, bytes);
                std::memcpy(call_.kept + at + weights.support.count, weights.support.weights, bytes);
            }
            at += 2 * weights.support.count;
        }
    }

    void count(int64_t b) {
        const int64_t all_rows = call_.batches * call_.heads * call_.queries;
        for (size_t r = 0; r < block_.rows.size(); r++) {
            const Support support = block_.support(r);
            const QueryRow& row = block_.rows[r];
            double mass = 0, entropy = 0, distance = 0;
            int64_t live = 0;
            for (int64_t j = 0; j < support.count; j++) mass += std::abs(double(support.weights[j]));
            for (int64_t j = 0; j < support.count; j++) {
                const float weight = support.weights[j];
                if (weight == 0) continue;
                live++;
                const double p = std::abs(double(weight)) / mass;
                entropy -= p * std::log(p);
                const int64_t key = support.keys[j];
                const int64_t ahead = call_.key_positions
                                          ? call_.key_positions[b * call_.key_positions_batch + key] - row.position
                                          : key - row.origin;
                distance += p * double(std::abs(ahead));
            }
            call_.statistics[row.number] = float(live);
            call_.statistics[all_rows + row.number] = float(entropy);
            call_.statistics[2 * all_rows + row.number] = float(distance);
        }
    }
};

// Ask for memory that is not used yet in large pages: the fewer, the less there is to wait for.
void in_large_pages(void* data, int64_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t size = 1 << 21;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + size - 1) / size * size;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) / size * size;
    if (data && first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

}  // namespace

extern "C" TAMIS_PUBLIC int32_t tamis_attention_forward(const Attention* call) {
    const Cut cut(*call);
    const int64_t heads = call->batches * call->key_heads;
    if (heads == 0 || cut.rows == 0) return kDone;
    const int64_t parts = std::min(cut.blocks, std::max<int64_t>(1, kForwardParts / heads));
    std::atomic<int64_t> kept{0};
    in_large_pages(call->kept, call->capacity * 4);
    return in_parallel_by_turns(heads * parts, [&](auto next) {
        Forward forward(*call, kept);
        for (int64_t task; (task = next()) >= 0;) {
            // The last rows first: causal ones take longest.
            const int64_t head = task / parts, part = parts - 1 - task % parts;
            forward.run(head / call->key_heads, head % call->key_heads, cut.blocks * part / parts,
                        cut.blocks * (part + 1) / parts, cut);
        }
    });
}

}  // namespace tamis
