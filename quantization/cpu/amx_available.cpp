// Whether the tile registers may be used. Compiled without any of their flags, for it runs on every CPU.
#include "kernels.h"

#if defined(HF_SPARSE_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hf_sparse {

#if defined(HF_SPARSE_AMX) && defined(__linux__)
namespace {

bool ask() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    const unsigned bf16 = 1u << 22, tile = 1u << 24;
    if ((edx & (bf16 | tile)) != (bf16 | tile)) return false;
    if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & 1u << 5)) return false;  // AVX-512 BF16
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("fma")) {
        return false;
    }
    // Linux saves the tiles of those processes only that ask for it; threads started later inherit the permission.
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

}  // namespace

bool amx_available() {
    static const bool available = ask();
    return available;
}
#else
bool amx_available() { return false; }
#endif

}  // namespace hf_sparse
