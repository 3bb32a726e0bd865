#include "attention_plan.h"

#include <algorithm>

namespace headwater {
namespace {

constexpr int kTileQueries = 24;

}  // namespace

AttentionPlan::AttentionPlan(const Batch& batch, const Spec& spec)
    : token_tile(batch.num_tokens) {
  const int group = spec.num_heads / spec.num_kv_heads;
  const int tile_tokens = std::max(1, kTileQueries / group);
  tile_queries = tile_tokens * group;
  for (int s = 0; s < batch.num_seqs; ++s) {
    const int begin = batch.cu_seqlens_q[s], end = batch.cu_seqlens_q[s + 1];
    const bool split = end - begin <= tile_tokens;
    // The last tokens see the most keys: begun first, they do not end last.
    for (int last = end; last > begin;) {
      const int first = std::max(begin, last - tile_tokens);
      const int blocks = batch.positions[last - 1] / kKeyBlock + 1;
      const int index = int(tiles.size());
      tiles.push_back({s, first, last - first, blocks, split ? num_partials : -1});
      if (split) num_partials += ptrdiff_t(last - first) * spec.num_heads * blocks;
      std::fill(token_tile.begin() + first, token_tile.begin() + last, index);
      for (int h = 0; h < spec.num_kv_heads; ++h)
        for (int b = 0; b < (split ? blocks : 1); ++b) items.push_back({index, h, split ? b : -1});
      last = first;
    }
  }
}

}  // namespace headwater
