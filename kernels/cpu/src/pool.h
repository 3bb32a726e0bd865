// A thread pool that runs lists of phases.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace headwater {

// Work items without an order among them. Threads claim items one by one, so a thread whose core
// is busy elsewhere claims fewer.
struct Phase {
  Phase(int num_items, std::function<void(int item, int thread)> function)
      : items(num_items), run(std::move(function)) {}

  const int items;
  const std::function<void(int item, int thread)> run;
  std::atomic<Phase*> following{nullptr};
  alignas(64) std::atomic<int> next{0};
  alignas(64) std::atomic<int> done{0};
};

// Phases run one after the other: a phase begins when all items of the one before are done. They
// may be added while threads work on those before, until the region is closed.
class Region {
 public:
  Region() = default;
  ~Region();
  Region(const Region&) = delete;

  void add(int items, std::function<void(int item, int thread)> run) {
    if (items > 0) append(new Phase(items, std::move(run)));
  }
  void close() { append(&end_); }

  // The phase after `phase`, waiting until there is one; null at the end.
  static Phase* after(Phase& phase);
  Phase& front() { return front_; }

 private:
  void append(Phase* phase);

  Phase front_{0, nullptr}, end_{0, nullptr};
  Phase* last_ = &front_;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();

  int threads() const { return int(workers_.size()) + 1; }

  // Closes the region and runs it on all threads, the caller being thread 0; returns when all its
  // items are done. Nothing waits for a worker that has not claimed an item: one that wakes late
  // finds the phases done, and holds the region, nothing else, until it has passed them.
  void run(std::shared_ptr<Region> region) {
    region->close();
    start(region);
    finish(*region);
  }

  // The halves of `run`: the workers begin, and go on without the caller, who closes the region,
  // until it joins them.
  void start(std::shared_ptr<Region> region);
  void finish(Region& region);

 private:
  void stop();
  void work_loop(int thread);
  static void work(Region& region, int thread);

  std::vector<std::thread> workers_;
  std::mutex mutex_;  // guards current_
  std::shared_ptr<Region> current_;
  std::atomic<unsigned> epoch_{0};
  std::atomic<bool> stopping_{false};
};

// Flushes denormals to zero while it lives; attention weights otherwise hit slow microcode.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();

 private:
  unsigned saved_;
};

}  // namespace headwater
