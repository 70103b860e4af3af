// Transformer layers as decoding runs them: products with packed weights, norms and residuals, on buffers that stay.
#pragma once

#include "decode_attention.h"
#include "product.h"

namespace tamis {

// The structures that follow are declared in src/tamis/native/layers.py as well.

enum class NormKind : int32_t { kNone = 0, kLayer = 1, kRms = 2 };

struct Norm {
    const float* weight;  // or null
    const float* bias;    // or null
    float epsilon;
    NormKind kind;
};

// What becomes of the heads' outputs, side by side, before they are projected: the norm of ReLA.
struct Merge {
    Norm norm;
    const float* gate;  // or null
};

struct Attention {
    Matrix query, key, value, output;
    Rectifier rule;
    Merge merge;
};

struct Sublayer {
    Norm before, after, last;  // of the input, of the output, of the sum
};

struct Layer {
    Attention own, cross;
    Matrix up, gate, down;
    Sublayer around_own, around_cross, around_feed;
    Function function;
};

struct Stack {
    const Layer* layers;
    int64_t count;
    int64_t embed_dim, heads, kv_heads, head_dim, ffn_dim;
    const float* slopes;  // of ALiBi, or null
    Norm last;
    Matrix output;            // of a decoder
    const float* embedding;   // of a decoder (vocabulary, embed_dim)
    float embedding_scale;
};

// Buffers of a stack that is run: they grow and stay.
struct Buffers {
    std::vector<float> input, projected, context, output, hidden, gate;
    ProductRoom room;

    void take(const Stack& stack, int64_t rows) {
        const int64_t wide = (stack.heads + 2 * stack.kv_heads) * stack.head_dim;
        grow(input, rows * stack.embed_dim);
        grow(output, rows * stack.embed_dim);
        grow(projected, rows * wide);
        grow(context, rows * stack.heads * stack.head_dim);
        grow(hidden, rows * stack.ffn_dim);
        grow(gate, rows * stack.ffn_dim);
    }

  private:
    static void grow(std::vector<float>& buffer, int64_t size) {
        if (int64_t(buffer.size()) < size) buffer.resize(size_t(size));
    }
};

// Raised where a call could not do its work; caught where the library is called.
struct Failed {
    Status status;
};
inline void need(Status status) {
    if (status != kDone) throw Failed{status};
}

// out = norm(x), rows of `width`; in place too.
void normalise(const Norm& norm, const float* x, int64_t rows, int64_t width, float* out);

// x (rows, heads * head_dim), in place
void merge_heads(const Merge& merge, float* x, int64_t rows, int64_t width);

// x + what a sublayer made of it: `run(input, output)` computes (rows, embed_dim) from (rows, embed_dim).
template <class Run>
void sublayer(const Sublayer& around, const Stack& stack, float* x, int64_t rows, Buffers& buffers, Run run) {
    const float* input = x;
    float* output = buffers.output.data();
    if (around.before.kind != NormKind::kNone) {
        normalise(around.before, x, rows, stack.embed_dim, buffers.input.data());
        input = buffers.input.data();
    }
    run(input, output);
    if (around.after.kind != NormKind::kNone) normalise(around.after, output, rows, stack.embed_dim, output);
    const int64_t count = rows * stack.embed_dim;
    for (int64_t i = 0; i < count; i++) x[i] += output[i];
    if (around.last.kind != NormKind::kNone) normalise(around.last, x, rows, stack.embed_dim, x);
}

void feed_forward(const Layer& layer, const Stack& stack, const float* input, int64_t rows, float* output, Buffers& buffers);

// Queries, keys and values of rows (rows, (heads + 2 kv_heads) * head_dim) side by side.
void project(const Attention& attention, const float* input, int64_t rows, float* out, const Stack& stack, ProductRoom& room);

// Keys across and values beside each other, of one head: rows from `from` with keys, and values `apart` behind them.
void lay_out(const float* from, int64_t stride, int64_t apart, int64_t count, int64_t head_dim, float* keys, int64_t room,
             float* values);

}  // namespace tamis
