// Memory that a kernel works in.
#pragma once

#include "kernels.h"

namespace hf_sparse {
namespace {

template <typename T>
struct Buffer {
    T* data;
    explicit Buffer(int64_t count) : data(static_cast<T*>(allocate(static_cast<size_t>(count) * sizeof(T)))) {}
    ~Buffer() { release(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
};

}  // namespace
}  // namespace hf_sparse
