// Weights that a product begins with, fetched while the phase before it ends.
#pragma once

#include <vector>

#include "ahead.h"
#include "layout.h"

namespace headwater {

// Where the items of a product find their weights, layer by layer. It holds all that it needs: a
// fetch may run when the step is over.
class WeightStream {
 public:
  // Each layer has so many matrices, which are added in the order of the items.
  explicit WeightStream(int matrices) : matrices_(matrices) {}

  void add(const Matrix& w, int items, int tiles_per_item) {
    parts_.push_back({w.data, w.tile_bytes() * tiles_per_item, items});
  }
  void fetch(int layer, int item) const {
    const Part* part = &parts_[size_t(layer) * matrices_];
    for (; item >= part->items; ++part) item -= part->items;
    const uint8_t* weights = part->data + part->item_bytes * item;
    for (int i = 0; i < kFetchBytes; i += Ahead::kLine)
      _mm_prefetch(reinterpret_cast<const char*>(weights) + i, _MM_HINT_T0);
  }

 private:
  static constexpr int kFetchBytes = 8192;
  struct Part {
    const uint8_t* data;
    size_t item_bytes;
    int items;
  };
  const int matrices_;
  std::vector<Part> parts_;
};

}  // namespace headwater
