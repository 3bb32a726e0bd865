// Owners of large memory.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace headwater {

// Zeroed anonymous memory, given by the kernel when it is first touched.
class Mapping {
 public:
  Mapping() = default;
  Mapping(size_t bytes, bool huge_pages) : bytes_(bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    if (huge_pages) madvise(p, bytes, MADV_HUGEPAGE);
    data_ = static_cast<unsigned char*>(p);
  }
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (data_) munmap(data_, bytes_);
  }

  unsigned char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  unsigned char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Scratch that only grows; its contents are lost when it does.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* reserve(size_t count) {
    if (count > count_) {
      std::free(data_);
      data_ = nullptr;
      count_ = 0;
      void* p = std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64);
      if (!p) throw std::bad_alloc();
      data_ = static_cast<T*>(p);
      count_ = count;
    }
    return data_;
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace headwater
