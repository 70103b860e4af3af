// Weights of attention as compressed rows, and sums over rows: what stands beside forward and backward.
#include "attention_block.h"
#include "turns.h"

namespace tamis {
// After a forward pass: the weights of row r to col and val from crow[r] on.
extern "C" TAMIS_PUBLIC int32_t tamis_attention_collect(const Attention* call, const int64_t* crow, int64_t* col, float* val) {
    const Cut cut(*call);
    const int64_t heads = call->batches * call->key_heads;
    if (heads == 0 || cut.rows == 0) return kDone;
    return in_parallel_by_turns(heads, [&](auto next) {
        Block block;
        for (int64_t head; (head = next()) >= 0;) {
            block.begin(*call, head / call->key_heads, head % call->key_heads, true);
            for (int64_t number = 0; number < cut.blocks; number++) {
                block.take(number * cut.size, std::min(cut.rows, (number + 1) * cut.size));
                block.fetch();
                for (size_t r = 0; r < block.rows.size(); r++) {
                    const Support support = block.support(r);
                    const int64_t at = crow[block.rows[r].number];
                    std::copy_n(support.keys, support.count, col + at);
                    std::copy_n(support.weights, support.count, val + at);
                }
            }
        }
    });
}

// Sums of numbers of rows (B, H, Lq) into totals of which distances may be 0, in one order whatever the threads.
extern "C" TAMIS_PUBLIC int32_t tamis_attention_total(
    const float* rows, int64_t batches, int64_t heads, int64_t queries, double* totals, int64_t batch, int64_t head,
    int64_t query) {
    for (int64_t b = 0; b < batches; b++)
        for (int64_t h = 0; h < heads; h++) {
            double* to = totals + b * batch + h * head;
            double sum = 0;
            for (int64_t i = 0; i < queries; i++, rows++) {
                if (query)
                    to[i * query] += *rows;
                else
                    sum += *rows;
            }
            if (!query) to[0] += sum;
        }
    return kDone;
}

}  // namespace tamis
