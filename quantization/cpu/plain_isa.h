// What an instruction set does without instructions of its own for it.
#pragma once

#include <cstdint>

namespace hf_sparse {
namespace {

struct PlainIsa {
    static int64_t keep(const float* below, const float* x, int64_t first, int64_t last, int64_t* to) {
        int64_t count = 0;
        for (int64_t i = first; i < last; i++) {
            to[count] = i;
            count += !((x[i] < 0 ? -x[i] : x[i]) < below[i]);
        }
        return count;
    }
};

}  // namespace
}  // namespace hf_sparse
