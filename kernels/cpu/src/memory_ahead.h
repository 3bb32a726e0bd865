// Has the kernel provide memory before it is written.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>

namespace headwater {

// A first touch costs a fault, and on virtual machines whose memory the host provides only then,
// 5 ms for 2 MiB and more: as long as a step. While a core has nothing else to do, a thread touches
// what is written next, from the beginning on and up to kBytes beyond what was used; so that of
// memory that is reserved, no more is taken than that. On a busy machine it does nothing.
class MemoryAhead {
 public:
  MemoryAhead(unsigned char* data, size_t bytes);
  ~MemoryAhead();

  // The first `bytes` are in use, or about to be.
  void use(size_t bytes);

 private:
  static constexpr size_t kBytes = size_t(40) << 20;
  static constexpr size_t kPiece = size_t(2) << 20;  // a huge page

  void run();
  size_t wanted() const;

  unsigned char* const data_;
  const size_t bytes_;
  std::atomic<size_t> used_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace headwater
