// Work of uneven parts: threads take the next one when they are done with theirs.
#pragma once

#include <atomic>

#include "threads.h"

namespace tamis {

// Calls work(next) on each thread, where next() gives the number of a part that nobody has yet, -1 at the end.
template <class Work>
Status in_parallel_by_turns(int64_t count, Work work) {
    std::atomic<int64_t> turn{0};
    const auto next = [&]() -> int64_t {
        const int64_t mine = turn.fetch_add(1);
        return mine < count ? mine : -1;
    };
    return in_parallel(count, 1, [&](int64_t, int64_t) {
        if (turn.load() < count) work(next);
    });
}

}  // namespace tamis
