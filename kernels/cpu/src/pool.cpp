#include "pool.h"

#include <immintrin.h>

namespace headwater {
namespace {

constexpr int kSpins = 2000;  // some 50 microseconds, then sleep in the kernel

// Waits until `value` is not `old`: a bounded spin, then a futex.
template <class T>
void await_change(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

Region::~Region() {
  for (Phase* phase = front_.following; phase && phase != &end_;) {
    Phase* following = phase->following;
    delete phase;
    phase = following;
  }
}

void Region::append(Phase* phase) {
  last_->following.store(phase, std::memory_order_release);
  last_->following.notify_all();
  last_ = phase;
}

Phase* Region::after(Phase& phase) {
  Phase* following = phase.following.load(std::memory_order_acquire);
  while (!following) {
    await_change(phase.following, following);
    following = phase.following.load(std::memory_order_acquire);
  }
  return following->items ? following : nullptr;
}

FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }

Pool::Pool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work_loop(i); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_ = true;
  ++epoch_;
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::start(std::shared_ptr<Region> region) {
  {
    const std::lock_guard lock(mutex_);
    current_ = std::move(region);
  }
  ++epoch_;
  epoch_.notify_all();
}

void Pool::finish(Region& region) {
  const FlushDenormals flush;
  work(region, 0);
  const std::lock_guard lock(mutex_);
  current_.reset();
}

void Pool::work_loop(int thread) {
  const FlushDenormals flush;
  unsigned seen = 0;
  while (true) {
    await_change(epoch_, seen);
    seen = epoch_.load(std::memory_order_acquire);
    if (stopping_) return;
    std::shared_ptr<Region> region;
    {
      const std::lock_guard lock(mutex_);
      region = current_;
    }
    if (region) work(*region, thread);
  }
}

void Pool::work(Region& region, int thread) {
  for (Phase* phase = &region.front(); (phase = Region::after(*phase)) != nullptr;) {
    int finished = 0;
    while (phase->next.load(std::memory_order_relaxed) < phase->items) {
      const int item = phase->next.fetch_add(1, std::memory_order_relaxed);
      if (item >= phase->items) break;
      phase->run(item, thread);
      ++finished;
    }
    if (finished && phase->done.fetch_add(finished) + finished == phase->items)
      phase->done.notify_all();
    for (int done; (done = phase->done.load(std::memory_order_acquire)) != phase->items;)
      await_change(phase->done, done);
  }
}

}  // namespace headwater
