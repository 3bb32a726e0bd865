// Which pages the next attention reads from memory, and which product fetches which of them.
#pragma once

#include <vector>

#include "ahead.h"
#include "attention_plan.h"
#include "step.h"

namespace headwater {

// A layer's pages from the fraction `begin` to the fraction `end` of their lines.
struct FetchPart {
  int layer = -1;  // -1: nothing
  double begin = 0;
  double end = 0;
};

// Products of many rows leave the memory idle, which attention of few rows waits for: meanwhile the
// pages of sequences with few new tokens are fetched, of all kv heads.
class FetchPlan {
 public:
  FetchPlan(const AttentionPlan& plan, const Batch& batch, const Model& model, const KVPool& kv);

  // What the products of a layer fetch for the attention that follows.
  FetchPart qkv(int layer) const;
  FetchPart o(int layer) const;
  FetchPart gated(int layer) const;
  FetchPart down(int layer) const;

  // Item `item` of `items` of the product that fetches `part`, and has `chances` to.
  Ahead share(const FetchPart& part, int item, int items, int chances) const;

 private:
  FetchPart part(int layer, double before, double own) const;

  const Model& model_;
  std::vector<const uint8_t*> pages_;
  ptrdiff_t layer_bytes_;
};

}  // namespace headwater
