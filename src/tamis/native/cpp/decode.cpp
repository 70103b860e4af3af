// Decoding: B sentences with W hypotheses each, a step for all of them in one call.
//
// The hypotheses of a sentence are queries of one tree of tokens (src/tamis/decoding/state.py says why): a place of the cache
// holds a token that some hypothesis has in its past, and `hidden_` says which places each of them does not see.  Choosing
// among hypotheses moves rows of `hidden_` alone; places that nobody sees are used again.
#include <memory>

#include "layers.h"

namespace tamis {
namespace {

class Decoding {
  public:
    // memory (all tokens of all sources, embed_dim); starts (sentences + 1) is where each source begins.
    Decoding(const Stack& stack, const float* memory, const int64_t* starts, int64_t sentences)
        : stack_(stack), sentences_(sentences), own_(size_t(stack.count)), cross_(size_t(stack.count)) {
        for (int64_t s = 0; s < sentences; s++) {
            rows_.push_back(s);
            read_.push_back(starts[s + 1] - starts[s]);
            source_places_ = std::max(source_places_, whole_pairs(read_.back()));
        }
        for (int64_t i = 0; i < stack.count; i++) read_source(i, memory, starts);
    }

    // tokens (sentences, width); position: what is added to their embeddings, or null; logits (sentences, width, vocabulary).
    void step(const int64_t* tokens, int64_t width, const float* position, float* logits) {
        const int64_t rows = sentences_ * width, d = stack_.embed_dim;
        for (int64_t r = 0; r < rows; r++) need(tokens[r] >= 0 && tokens[r] < stack_.output.outputs ? kDone : kBadTarget);
        find_places(width);
        buffers_.take(stack_, rows);
        if (int64_t(x_.size()) < rows * d) x_.resize(size_t(rows * d));
        float* x = x_.data();
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < d; j++)
                x[r * d + j] = stack_.embedding[tokens[r] * d + j] * stack_.embedding_scale + (position ? position[j] : 0.0f);
        for (int64_t i = 0; i < stack_.count; i++) {
            const Layer& layer = stack_.layers[i];
            sublayer(layer.around_own, stack_, x, rows, buffers_,
                     [&](const float* input, float* output) { attend_to_own(i, input, output); });
            sublayer(layer.around_cross, stack_, x, rows, buffers_,
                     [&](const float* input, float* output) { attend_to_source(i, input, output); });
            sublayer(layer.around_feed, stack_, x, rows, buffers_, [&](const float* input, float* output) {
                feed_forward(layer, stack_, input, rows, output, buffers_);
            });
        }
        if (stack_.last.kind != NormKind::kNone) normalise(stack_.last, x, rows, d, x);
        need(product(stack_.output, x, rows, Function::kNone, logits, buffers_.room));
        length_++;
    }

    // Hypothesis w of sentence s continues what parents[s, w] was.
    void choose(const int64_t* parents, int64_t width) {
        std::vector<float> hidden(size_t(sentences_ * width * places_));
        for (int64_t s = 0; s < sentences_; s++)
            for (int64_t w = 0; w < width; w++) {
                const float* from = hidden_.data() + (s * width_ + parents[s * width + w]) * places_;
                std::copy(from, from + places_, hidden.data() + (s * width + w) * places_);
            }
        hidden_.swap(hidden);
        width_ = width;
    }

    // Go on with these sentences only: what is theirs stays where it lies.
    void keep(const int64_t* which, int64_t count) {
        std::vector<int64_t> rows;
        std::vector<float> hidden;
        for (int64_t i = 0; i < count; i++) {
            rows.push_back(rows_[which[i]]);
            const float* from = hidden_.data() + which[i] * width_ * places_;
            hidden.insert(hidden.end(), from, from + width_ * places_);
        }
        rows_.swap(rows);
        hidden_.swap(hidden);
        sentences_ = count;
    }

    int64_t sentences() const { return sentences_; }
    int64_t places() const { return places_; }

  private:
    struct Cache {
        std::vector<float> keys, values;  // of each sentence and key head: (head_dim, places), (places, whole width)
    };

    const Stack stack_;
    int64_t sentences_, width_ = 1, places_ = 0, source_places_ = 0, length_ = 0;
    std::vector<Cache> own_, cross_;
    std::vector<int64_t> rows_;    // where the caches of each sentence are
    std::vector<int64_t> read_;    // by row: tokens of the source
    std::vector<float> hidden_;    // (sentences, width, places): 0 for what a hypothesis has in its past, else -inf
    std::vector<float> when_;      // (rows, places): positions of what the places hold
    std::vector<int64_t> slots_;   // (sentences, width): places of the new tokens
    std::vector<int64_t> used_;    // (sentences): the places in use are before
    std::vector<float> x_;
    Buffers buffers_;

    static int64_t whole_pairs(int64_t count) { return whole_vectors(whole_vectors(count) + kLanes<float>); }
    int64_t width_of_values() const { return whole_vectors(stack_.head_dim); }
    float* keys(Cache& cache, int64_t row, int64_t group, int64_t places) const {
        return cache.keys.data() + (row * stack_.kv_heads + group) * stack_.head_dim * places;
    }
    float* values(Cache& cache, int64_t row, int64_t group, int64_t places) const {
        return cache.values.data() + (row * stack_.kv_heads + group) * width_of_values() * places;
    }
    void size(Cache& cache, int64_t places) const {
        const size_t count = rows_.size() * size_t(stack_.kv_heads * places);
        cache.keys.assign(count * size_t(stack_.head_dim), 0.0f);
        cache.values.assign(count * size_t(width_of_values()), 0.0f);
    }

    void read_source(int64_t number, const float* memory, const int64_t* starts) {
        const Attention& attention = stack_.layers[number].cross;
        const int64_t rows = starts[sentences_], half = stack_.kv_heads * stack_.head_dim;
        std::vector<float> projected(size_t(rows * 2 * half));
        const Matrix* parts[] = {&attention.key, &attention.value};
        need(product(parts, 2, memory, stack_.embed_dim, rows, Function::kNone, projected.data(), 2 * half, buffers_.room));
        Cache& cache = cross_[size_t(number)];
        size(cache, source_places_);
        need(in_parallel(sentences_ * stack_.kv_heads, 1, [&](int64_t first, int64_t last) {
            for (int64_t item = first; item < last; item++) {
                const int64_t s = item / stack_.kv_heads, group = item % stack_.kv_heads;
                lay_out(projected.data() + starts[s] * 2 * half + group * stack_.head_dim, 2 * half, half, read_[s],
                        stack_.head_dim, keys(cache, s, group, source_places_), source_places_,
                        values(cache, s, group, source_places_));
            }
        }));
    }

    // A place for each new token, which from then on sees itself.
    void find_places(int64_t width) {
        if (places_ == 0) {
            make_room(2 * kLanes<float>);
            width_ = width;
            hidden_.assign(size_t(sentences_ * width * places_), -kInf<float>);
        }
        slots_.resize(size_t(sentences_ * width));
        used_.resize(size_t(sentences_));
        for (int64_t s = 0; s < sentences_; s++)
            while (!find_places_of(s, width)) make_room(2 * places_);
        for (int64_t i = 0; i < sentences_ * width; i++) {
            hidden_[size_t(i * places_ + slots_[size_t(i)])] = 0.0f;
            when_[size_t(rows_[size_t(i / width)] * places_ + slots_[size_t(i)])] = float(length_);
        }
    }

    bool find_places_of(int64_t s, int64_t width) {
        int64_t found = 0, last = 0;
        for (int64_t j = 0; j < places_; j++) {
            bool seen = false;
            for (int64_t w = 0; w < width; w++) seen |= hidden_[size_t((s * width + w) * places_ + j)] == 0.0f;
            if (!seen && found < width) slots_[size_t(s * width + found++)] = j, seen = true;
            if (seen) last = j + 1;
        }
        used_[size_t(s)] = last;
        return found == width;
    }

    void make_room(int64_t places) {
        places = whole_pairs(places - kLanes<float>);
        const int64_t before = places_, rows = int64_t(read_.size());
        for (Cache& cache : own_) {
            Cache larger;
            const size_t count = size_t(rows * stack_.kv_heads * places);
            larger.keys.assign(count * size_t(stack_.head_dim), 0.0f);
            larger.values.assign(count * size_t(width_of_values()), 0.0f);
            for (int64_t item = 0; before && item < rows * stack_.kv_heads; item++) {
                copy_rows(cache.keys.data() + item * stack_.head_dim * before, before,
                          larger.keys.data() + item * stack_.head_dim * places, places, stack_.head_dim);
                copy_rows(cache.values.data() + item * width_of_values() * before, width_of_values() * before,
                          larger.values.data() + item * width_of_values() * places, 0, 1);
            }
            cache = std::move(larger);
        }
        const auto widened = [&](const std::vector<float>& from, int64_t count, float rest) {
            std::vector<float> to(size_t(count * places), rest);
            if (before) copy_rows(from.data(), before, to.data(), places, count);
            return to;
        };
        hidden_ = widened(hidden_, before ? sentences_ * width_ : 0, -kInf<float>);
        when_ = widened(when_, rows, 0.0f);
        places_ = places;
    }

    // Rows of `width` numbers, one behind the other, to rows `stride` apart.
    static void copy_rows(const float* from, int64_t width, float* to, int64_t stride, int64_t rows) {
        for (int64_t r = 0; r < rows; r++) std::copy(from + r * width, from + (r + 1) * width, to + r * stride);
    }

    void attend_to_own(int64_t number, const float* input, float* output) {
        const Attention& attention = stack_.layers[number].own;
        const int64_t head_dim = stack_.head_dim, wide = (stack_.heads + 2 * stack_.kv_heads) * head_dim;
        project(attention, input, sentences_ * width_, buffers_.projected.data(), stack_, buffers_.room);
        const std::vector<float> now = std::vector<float>(size_t(width_), float(length_));
        Cache& cache = own_[size_t(number)];
        for_each_group([&](int64_t s, int64_t group, AttentionRoom& room) {
            const int64_t row = rows_[size_t(s)];
            float* k = keys(cache, row, group, places_);
            float* v = values(cache, row, group, places_);
            for (int64_t w = 0; w < width_; w++) {
                const int64_t at = slots_[size_t(s * width_ + w)];
                const float* new_key = buffers_.projected.data() + (s * width_ + w) * wide + (stack_.heads + group) * head_dim;
                lay_out(new_key, 0, stack_.kv_heads * head_dim, 1, head_dim, k + at, places_, v + at * width_of_values());
            }
            const Keys of{k, v, places_, used_[size_t(s)], hidden_.data() + s * width_ * places_, places_,
                          when_.data() + row * places_};
            attend_group(attention.rule, stack_.slopes, s, group, of, wide, now.data(), room);
        });
        finish(attention, output);
    }

    void attend_to_source(int64_t number, const float* input, float* output) {
        const Attention& attention = stack_.layers[number].cross;
        need(product(attention.query, input, sentences_ * width_, Function::kNone, buffers_.projected.data(), buffers_.room));
        Cache& cache = cross_[size_t(number)];
        for_each_group([&](int64_t s, int64_t group, AttentionRoom& room) {
            const int64_t row = rows_[size_t(s)];
            const Keys of{keys(cache, row, group, source_places_), values(cache, row, group, source_places_), source_places_,
                          read_[size_t(row)], nullptr, 0, nullptr};
            attend_group(attention.rule, nullptr, s, group, of, stack_.heads * stack_.head_dim, nullptr, room);
        });
        finish(attention, output);
    }

    template <class Work>
    void for_each_group(Work work) {
        need(in_parallel(sentences_ * stack_.kv_heads, 1, [&](int64_t first, int64_t last) {
            thread_local AttentionRoom room;
            for (int64_t item = first; item < last; item++) work(item / stack_.kv_heads, item % stack_.kv_heads, room);
        }));
    }

    // The query heads that share these keys.
    void attend_group(const Rectifier& rule, const float* slopes, int64_t s, int64_t group, const Keys& of, int64_t stride,
                      const float* now, AttentionRoom& room) {
        const int64_t share = stack_.heads / stack_.kv_heads, wide = stack_.heads * stack_.head_dim;
        for (int64_t head = group * share; head < (group + 1) * share; head++)
            attend(buffers_.projected.data() + s * width_ * stride + head * stack_.head_dim, stride, width_, stack_.head_dim,
                   head, of, rule, slopes ? slopes[head] : 0.0f, now,
                   buffers_.context.data() + s * width_ * wide + head * stack_.head_dim, wide, room);
    }

    void finish(const Attention& attention, float* output) {
        const int64_t rows = sentences_ * width_;
        merge_heads(attention.merge, buffers_.context.data(), rows, stack_.heads * stack_.head_dim);
        need(product(attention.output, buffers_.context.data(), rows, Function::kNone, output, buffers_.room));
    }
};

template <class Work>
int32_t guarded(Work work) {
    try {
        work();
        return kDone;
    } catch (const Failed& failed) {
        return failed.status;
    } catch (const std::exception&) {
        return kOutOfMemory;
    }
}

}  // namespace

extern "C" {

// Null where memory ran out.  The stack is copied, what it points to is not.
TAMIS_PUBLIC void* tamis_decoding_new(const Stack* stack, const float* memory, const int64_t* starts, int64_t sentences) {
    Decoding* made = nullptr;
    guarded([&] { made = new Decoding(*stack, memory, starts, sentences); });
    return made;
}

TAMIS_PUBLIC void tamis_decoding_free(void* decoding) { delete static_cast<Decoding*>(decoding); }

TAMIS_PUBLIC int32_t tamis_decoding_step(void* decoding, const int64_t* tokens, int64_t width, const float* position, float* logits) {
    return guarded([&] { static_cast<Decoding*>(decoding)->step(tokens, width, position, logits); });
}

TAMIS_PUBLIC int32_t tamis_decoding_choose(void* decoding, const int64_t* parents, int64_t width) {
    return guarded([&] { static_cast<Decoding*>(decoding)->choose(parents, width); });
}

TAMIS_PUBLIC int32_t tamis_decoding_keep(void* decoding, const int64_t* which, int64_t count) {
    return guarded([&] { static_cast<Decoding*>(decoding)->keep(which, count); });
}

// Places for tokens of each sentence.
TAMIS_PUBLIC int64_t tamis_decoding_places(const void* decoding) { return static_cast<const Decoding*>(decoding)->places(); }

}  // extern "C"

}  // namespace tamis
