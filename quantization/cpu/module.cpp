// The Python face of the kernels. Arguments are addresses and sizes that quantization/ops.py and neuron_matrix.py have
// checked; what is checked here is the index, because it is the one thing that costs a pass over data.

#include <nanobind/nanobind.h>

#include <cstdlib>
#include <new>

#include "kernels.h"

namespace nb = nanobind;

namespace hf_sparse {

void* allocate(size_t bytes) {
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (!memory) throw std::bad_alloc();
    return memory;
}

void release(void* memory) { std::free(memory); }

namespace {

const Kernels* const by_level[] = {
    &portable_kernels,
#ifdef HF_SPARSE_X86
    &avx2_kernels,
    &avx512_kernels,
#endif
};

// Names of what this CPU can run, best first, with their place in by_level.
nb::dict levels() {
    nb::dict found;
#ifdef HF_SPARSE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma")) {
        found["avx512_vnni"] = 2;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found["avx2"] = 1;
#endif
    found["portable"] = 0;
    return found;
}

template <typename T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

bool strictly_ascending(const Selection& selection, int64_t rows) {
    if (!selection.index) return true;
    int64_t previous = -1;
    for (int64_t i = 0; i < selection.count; i++) {
        if (selection.index[i] <= previous) return false;
        previous = selection.index[i];
    }
    return previous < rows;
}

bool quantize(int level, uintptr_t weight, int64_t rows, int64_t cols, int64_t group_size, uintptr_t thresholds,
              float divisor, bool signed_peak, uintptr_t codes, uintptr_t scales, int threads) {
    const Rule rule{pointer<const float>(thresholds), divisor, signed_peak};
    return by_level[level]->quantize(pointer<const float>(weight), rows, cols, group_size, rule,
                                     pointer<uint8_t>(codes), pointer<uint16_t>(scales), threads);
}

bool dequantize(int level, uintptr_t codes, uintptr_t scales, uintptr_t table, int64_t rows, int64_t cols,
                int64_t group_size, uintptr_t index, int64_t count, uintptr_t out, bool bf16, int threads) {
    const Matrix matrix{pointer<const uint8_t>(codes),
                        pointer<const uint16_t>(scales),
                        nullptr,
                        pointer<const int8_t>(table),
                        rows,
                        cols,
                        group_size};
    const Selection selection{pointer<const int64_t>(index), count};
    if (!strictly_ascending(selection, rows)) return false;
    by_level[level]->dequantize(matrix, selection, pointer<void>(out), bf16, threads);
    return true;
}

bool row_product(int level, uintptr_t codes, uintptr_t scales, uintptr_t table, int64_t rows, int64_t cols,
                 int64_t group_size, uintptr_t index, int64_t count, uintptr_t x, int64_t n, bool integer,
                 uintptr_t out, int threads) {
    const Matrix matrix{pointer<const uint8_t>(codes),
                        pointer<const uint16_t>(scales),
                        nullptr,
                        pointer<const int8_t>(table),
                        rows,
                        cols,
                        group_size};
    const Selection selection{pointer<const int64_t>(index), count};
    if (!strictly_ascending(selection, rows)) return false;
    by_level[level]->row_product(matrix, selection, pointer<const float>(x), n, integer, pointer<float>(out), threads);
    return true;
}

bool accumulate(int level, uintptr_t codes, uintptr_t scales, uintptr_t table, int64_t rows, int64_t cols,
                int64_t group_size, uintptr_t index, int64_t count, uintptr_t a, int64_t n, uintptr_t out,
                int threads) {
    const Matrix matrix{pointer<const uint8_t>(codes),
                        pointer<const uint16_t>(scales),
                        nullptr,
                        pointer<const int8_t>(table),
                        rows,
                        cols,
                        group_size};
    const Selection selection{pointer<const int64_t>(index), count};
    if (!strictly_ascending(selection, rows)) return false;
    by_level[level]->accumulate(matrix, selection, pointer<const float>(a), n, pointer<float>(out), threads);
    return true;
}

#ifdef HF_SPARSE_AMX
template <decltype(&amx_row_product) product>
bool amx_product(uintptr_t codes, uintptr_t scales, uintptr_t offsets, uintptr_t table, int64_t rows, int64_t cols,
                 int64_t group_size, uintptr_t index, int64_t count, uintptr_t x, int64_t n, uintptr_t out,
                 int threads) {
    const Matrix matrix{pointer<const uint8_t>(codes),
                        pointer<const uint16_t>(scales),
                        pointer<const uint16_t>(offsets),
                        pointer<const int8_t>(table),
                        rows,
                        cols,
                        group_size};
    const Selection selection{pointer<const int64_t>(index), count};
    if (!strictly_ascending(selection, rows)) return false;
    product(matrix, selection, pointer<const float>(x), n, pointer<float>(out), threads);
    return true;
}
#endif

}  // namespace
}  // namespace hf_sparse

NB_MODULE(_kernels, module) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    module.def("levels", &hf_sparse::levels);
    module.def("quantize", &hf_sparse::quantize, Unlocked());
    module.def("dequantize", &hf_sparse::dequantize, Unlocked());
    module.def("row_product", &hf_sparse::row_product, Unlocked());
    module.def("accumulate", &hf_sparse::accumulate, Unlocked());
    module.def("amx_available", &hf_sparse::amx_available);
#ifdef HF_SPARSE_AMX
    module.def("amx_row_product", &hf_sparse::amx_product<&hf_sparse::amx_row_product>, Unlocked());
    module.def("amx_accumulate", &hf_sparse::amx_product<&hf_sparse::amx_accumulate>, Unlocked());
#endif
}
