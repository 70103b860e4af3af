// The best of many scores, and their log-probabilities under softmax: two passes over a row that stays in the cache.
#include <algorithm>

#include "rows.h"

namespace tamis {
namespace {

constexpr int64_t kBlock = 256;

struct Best {
    int64_t width, count;
    const int64_t* forbidden;  // in order
    int64_t forbidden_count;

    // Ordered from the best; among equals the first comes first.
    void find(const float* scores, const float* maxima, float* top, int64_t* index) const {
        int64_t have = 0;
        for (int64_t j = 0; j < width; j++) {
            // Whole blocks in which nothing is good enough are passed over.
            if (j % kBlock == 0 && have == count && !(maxima[j / kBlock] > top[count - 1])) {
                j += kBlock - 1;
                continue;
            }
            const float score = scores[j];
            if (have == count && !(score > top[count - 1])) continue;
            if (std::binary_search(forbidden, forbidden + forbidden_count, j)) continue;
            int64_t at = have < count ? have++ : count - 1;
            for (; at > 0 && top[at - 1] < score; at--) top[at] = top[at - 1], index[at] = index[at - 1];
            top[at] = score;
            index[at] = j;
        }
        for (int64_t i = have; i < count; i++) top[i] = -kInf<float>, index[i] = 0;
    }

    void row(const float* scores, float* maxima, float* top, int64_t* index) const {
        float largest = -kInf<float>;
        bool strange = false;
        for (int64_t j = 0; j < width; j += kBlock) {
            const int64_t end = std::min(width, j + kBlock);
            FloatVec most = all(-kInf<float>);
            FloatBits odd{};
            for (int64_t i = j; i < end; i += kLanes<float>) {
                const FloatVec x = part(scores, i, end);
                odd |= x != x;
                most = max(x, most);
            }
            strange |= any(odd);
            maxima[j / kBlock] = tamis::largest<float>(most);
            largest = std::max(largest, maxima[j / kBlock]);
        }
        double total = 0;
        for (int64_t j = 0; j < width; j += kBlock) {
            const int64_t end = std::min(width, j + kBlock);
            FloatVec sums{};
            for (int64_t i = j; i < end; i += kLanes<float>) sums += exp(max(part(scores, i, end) - largest, all(-100.0f)));
            total += sum<float>(sums);
        }
        find(scores, maxima, top, index);
        const bool finite = !strange && largest > -kInf<float> && largest < kInf<float>;
        const float log_total = finite ? float(std::log(total)) : std::numeric_limits<float>::quiet_NaN();
        for (int64_t i = 0; i < count; i++) top[i] = (top[i] - largest) - log_total;
    }

    static FloatVec part(const float* scores, int64_t j, int64_t end) {
        return end - j < kLanes<float> ? load_some(scores + j, int(end - j), -kInf<float>) : load(scores + j);
    }
};

}  // namespace

extern "C" {

// The `count` best of each row of scores (rows, width) but for those forbidden, which are in order: (rows, count) of
// log-probabilities, -inf where there are fewer, and indices.  A row without a finite largest score gives no numbers.
TAMIS_PUBLIC int32_t tamis_best(const float* scores, int64_t rows, int64_t width, int64_t count, const int64_t* forbidden,
                                int64_t forbidden_count, float* top, int64_t* index) {
    const Best best{width, count, forbidden, forbidden_count};
    return in_parallel(rows, 1 + kGrain / width, [&](int64_t first, int64_t last) {
        thread_local Scratch<float> room;
        float* maxima = room.take((width + kBlock - 1) / kBlock);
        for (int64_t r = first; r < last; r++) best.row(scores + r * width, maxima, top + r * count, index + r * count);
    });
}

}  // extern "C"

}  // namespace tamis
