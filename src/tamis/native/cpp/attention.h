// One call of attention as Python describes it: tensors by address and distances, options by number.  The same fields in the
// same order stand in src/tamis/native/arguments.py.
#pragma once

#include <cstdint>

namespace tamis {

// fp32, with numbers of a row side by side; distances between sequences, heads and rows are counted in numbers.
struct Tensor {
    float* data;
    int64_t batch, head, row;

    float* at(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * row; }
};

enum RuleName : int64_t { kEntmax = 0, kRelu = 1, kSquaredRelu = 2, kLeakyRelu = 3 };
enum MaskKind : int64_t { kNoMask = 0, kBoolean = 1, kAdditive = 2 };

struct Attention {
    // Head sizes are multiples of 16: Python fills up.
    Tensor query, key, value, out, grad, d_query, d_key, d_value;
    int64_t batches, heads, key_heads, queries, keys, dim, value_dim;
    int64_t key_step;  // from number to number of a key: 1, or else keys lie side by side and their `row` is 1
    double scale;

    RuleName rule;
    double bias, slope;  // of activations
    Tensor e;            // alpha - 1 of each row, or null
    Tensor row_scale;    // a factor of the weights of each row, or null

    const void* mask;  // or null
    MaskKind mask_kind;
    int64_t mask_batch, mask_head, mask_row, mask_key;
    const float* slopes;  // of ALiBi, or null
    int64_t slopes_batch, slopes_head;
    const int64_t* query_positions;  // or null
    int64_t query_positions_batch;
    const int64_t* key_positions;  // or null
    int64_t key_positions_batch;
    const int64_t* lengths;  // of the keys of each sequence, or null
    const int64_t* cu_queries;  // where packed sequences begin, or null
    const int64_t* cu_keys;
    int64_t segments;
    int64_t left, right;  // positions seen before and after the query's own, -1: all

    const int32_t* pages;  // (B, n), or null: keys and values are then pools, and `head` and `row` distances in a page
    int64_t pages_batch, page;

    double dropout;
    uint64_t seed;
    int64_t first_head, first_query;  // what dropout counts from: where these are a part of a larger call

    int32_t* kept;  // the weights for the backward pass, as far as they fit
    int64_t capacity;
    int64_t* places;  // (B, H, Lq): where in `kept` a row begins, -1: nowhere
    int32_t* counts;  // (B, H, Lq): non-zeros of a row; below 0: -1 - count, and the row is kept with its zeros

    float* statistics;  // (3, B, H, Lq): support size, entropy and mean distance, or null
    float* d_e;         // (B, H, Lq), or null where nobody asks
    float* d_slopes;    // (B, H, Lq), or null

    int64_t groups() const { return key_heads ? heads / key_heads : 0; }
    int64_t row_number(int64_t b, int64_t h, int64_t i) const { return (b * heads + h) * queries + i; }
};

}  // namespace tamis
