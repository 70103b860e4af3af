// What every build of the library answers, whichever instruction set it is for.
#include <cstdint>

#include "rows.h"

extern "C" {

TAMIS_PUBLIC void tamis_use_threads_of(void* torch_parallel_for) {
    tamis::parallel_for_of_torch = reinterpret_cast<tamis::ParallelFor>(torch_parallel_for);
}

// The highest level of x86-64 that this processor and system have all of: 4, 3 or 1; elsewhere 0.
TAMIS_PUBLIC int32_t tamis_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool third = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                       __builtin_cpu_supports("bmi2");
    const bool fourth = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    return third ? (fourth ? 4 : 3) : 1;
#else
    return 0;
#endif
}

}  // extern "C"
