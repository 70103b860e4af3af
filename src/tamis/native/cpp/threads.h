// Work shared out to the threads of torch, through the C function that its library exports: no second pool of threads, and
// `torch.set_num_threads` holds.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>

namespace tamis {

using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, void (*)(int64_t, int64_t, void*), void*);

inline ParallelFor parallel_for_of_torch = nullptr;

// What a call returns: no exception leaves a library that is called through ctypes.
enum Status : int32_t { kDone = 0, kOutOfMemory = 1, kBadTarget = 2 };

// Calls work(first, last) for parts of 0 to count; a thread takes `grain` items or more.
template <class Work>
Status in_parallel(int64_t count, int64_t grain, Work work) {
    struct Shared {
        Work& work;
        std::atomic<int32_t> failed{kDone};
    } shared{work};
    const auto part = [](int64_t first, int64_t last, void* context) {
        auto& own = *static_cast<Shared*>(context);
        try {
            own.work(first, last);
        } catch (const std::out_of_range&) {
            own.failed = kBadTarget;
        } catch (const std::exception&) {
            own.failed = kOutOfMemory;
        }
    };
    const int32_t error = parallel_for_of_torch(0, count, grain < 1 ? 1 : grain, part, &shared);
    return error ? kOutOfMemory : Status(shared.failed.load());
}

}  // namespace tamis
