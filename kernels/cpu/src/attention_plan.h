// How the attention of a batch is cut into items for the threads; the same for all layers.
#pragma once

#include <vector>

#include "step.h"

namespace headwater {

// Consecutive new tokens of one sequence whose queries are computed together.
struct QueryTile {
  int seq;
  int first_token;
  int num_tokens;
  int num_blocks;      // key blocks up to the last token
  ptrdiff_t partials;  // the first of its partials [kv_head][block][query], or -1: its items merge
};

struct AttendItem {
  int tile;
  int kv_head;
  int block;  // -1: all, in ascending order
};

// A sequence with few new tokens is split over key blocks, whose partials are merged later; others
// over tiles of tokens. Either way blocks are merged in ascending order.
struct AttentionPlan {
  AttentionPlan(const Batch& batch, const Spec& spec);

  std::vector<QueryTile> tiles;
  std::vector<AttendItem> items;
  std::vector<int> token_tile;  // [num_tokens]
  ptrdiff_t num_partials = 0;
  int tile_queries = 0;  // query rows of a full tile, all heads of one kv head
};

}  // namespace headwater
