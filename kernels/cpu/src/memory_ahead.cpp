#include "memory_ahead.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>

namespace headwater {
namespace {

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14
#endif

}  // namespace

MemoryAhead::MemoryAhead(unsigned char* data, size_t bytes)
    : data_(data), bytes_(bytes), thread_([this] { run(); }) {}

MemoryAhead::~MemoryAhead() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void MemoryAhead::use(size_t bytes) {
  if (bytes <= used_.load(std::memory_order_relaxed)) return;
  {
    const std::lock_guard lock(mutex_);
    used_ = bytes;
  }
  changed_.notify_one();
}

size_t MemoryAhead::wanted() const { return std::min(bytes_, used_ + kBytes); }

void MemoryAhead::run() {
  const sched_param none{};
  if (sched_setscheduler(0, SCHED_IDLE, &none) != 0) return;
  std::unique_lock lock(mutex_);
  for (size_t touched = 0; touched < bytes_;) {
    changed_.wait(lock, [&] { return stopping_ || touched < wanted(); });
    if (stopping_) return;
    // What was written meanwhile is there already.
    touched = std::max(touched, used_ / kPiece * kPiece);
    const size_t piece = std::min(kPiece, bytes_ - touched);
    lock.unlock();
    // Not where the kernel is older, or short of memory: a first touch does it then.
    const bool done = madvise(data_ + touched, piece, MADV_POPULATE_WRITE) == 0;
    lock.lock();
    if (!done) return;
    touched += piece;
  }
}

}  // namespace headwater
