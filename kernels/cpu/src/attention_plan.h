// How the attention of a batch is cut into items for the threads; the same for all layers.
#pragma once

#include <vector>

#include "step.h"

namespace headwater {

// New tokens whose queries are computed together, over the key blocks that they see through one
// page table.
struct QueryTile {
  int seq;          // whose page table is read
  int first;        // in AttentionPlan::tokens
  int num_tokens;
  int end_block;    // of the key blocks
};

struct AttendItem {
  int tile;
  int kv_head;
  int block;  // -1: all, in ascending order
};

// Where the partials of a token's key blocks are kept until they are merged in ascending order.
struct TokenPartials {
  ptrdiff_t first = -1;  // [head][block]; -1: the items of its tile merge
  int num_blocks = 0;
};

// A sequence with few new tokens is split over key blocks, whose partials are merged later; others
// over tiles of tokens. Sequences of a prefix group meet in one tile for the blocks that lie wholly
// in their shared pages. Whoever computes a block, blocks are merged in ascending order.
class AttentionPlan {
 public:
  AttentionPlan(const Batch& batch, const Spec& spec, int page_size);

  std::vector<int> tokens;
  std::vector<QueryTile> tiles;
  std::vector<AttendItem> items;
  std::vector<TokenPartials> partials;  // [num_tokens]
  ptrdiff_t num_partials = 0;
  int tile_queries = 0;  // query rows of a full tile, all heads of one kv head

 private:
  int shared_blocks(const int32_t* members, int count, int pages) const;
  void add_group(const std::vector<int>& members, int blocks);
  void add_sequence(int seq, int first_block);
  void add_items(int tile, int first_block, int end_block);

  int num_new(int seq) const { return batch_.cu_seqlens_q[seq + 1] - batch_.cu_seqlens_q[seq]; }
  bool split(int seq) const { return num_new(seq) <= tile_tokens_; }

  const Batch& batch_;
  const Spec& spec_;
  const int page_size_;
  int tile_tokens_ = 0;
};

}  // namespace headwater
