// Memory that a later phase reads, fetched into the cache line by line while a product computes.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace headwater {

// Lines of runs that are all equally long; each run begins `offset` bytes after its pointer.
struct Ahead {
  static constexpr int kLine = 64;

  const uint8_t* const* run = nullptr;
  ptrdiff_t offset = 0;
  int lines = 0;  // of a run
  int line = 0;   // of *run, the next to be fetched
  int left = 0;   // lines in all
  int pace = 0;   // lines at a time

  void fetch() {
    for (int i = 0; i < pace && left > 0; ++i, --left) {
      _mm_prefetch(reinterpret_cast<const char*>(*run + offset + kLine * line), _MM_HINT_T1);
      if (++line == lines) {
        line = 0;
        ++run;
      }
    }
  }
};

}  // namespace headwater
