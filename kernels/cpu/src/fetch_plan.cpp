#include "fetch_plan.h"

#include <algorithm>

namespace headwater {
namespace {

constexpr int kMinRows = 8;  // products of fewer rows wait for memory themselves
constexpr int kMaxPace = 4;

double weights(const Matrix& w) { return double(w.rows) * w.cols; }
double qkv_weights(const Layer& l) { return weights(l.q) + weights(l.k) + weights(l.v); }
double mlp_weights(const Layer& l) { return 3 * weights(l.down); }

}  // namespace

FetchPlan::FetchPlan(const AttentionPlan& plan, const Batch& batch, const Model& model,
                     const KVPool& kv)
    : model_(model), layer_bytes_(ptrdiff_t(kv.shape.layer_bytes())) {
  if (batch.num_tokens < kMinRows) return;
  const int page_size = kv.shape.page_size;
  std::vector<int32_t> ids;
  for (const AttendItem& item : plan.items) {
    if (item.block < 0 || item.kv_head) continue;
    const QueryTile& tile = plan.tiles[item.tile];
    const int seen = (batch.seq_lens[tile.seq] + page_size - 1) / page_size;
    const int per_block = kKeyBlock / page_size, first = item.block * per_block;
    const int32_t* table = batch.page_table + size_t(tile.seq) * batch.max_pages;
    ids.insert(ids.end(), table + first, table + std::min(first + per_block, seen));
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (const int32_t id : ids) pages_.push_back(kv.page(id));
}

FetchPart FetchPlan::qkv(int layer) const {
  const Layer& l = model_.layers[layer];
  const Layer* last = layer ? &l - 1 : nullptr;
  return part(layer, last ? weights(last->o) + mlp_weights(*last) : 0, qkv_weights(l));
}

FetchPart FetchPlan::o(int layer) const {
  return part(layer + 1, 0, weights(model_.layers[layer].o));
}

FetchPart FetchPlan::gated(int layer) const {
  const Layer& l = model_.layers[layer];
  return part(layer + 1, weights(l.o), mlp_weights(l) * 2 / 3);
}

FetchPart FetchPlan::down(int layer) const {
  const Layer& l = model_.layers[layer];
  return part(layer + 1, weights(l.o) + mlp_weights(l) * 2 / 3, mlp_weights(l) / 3);
}

// The part of the pages of `layer` that is fetched by a product which begins after `before` weights
// of those since the last attention, and has `own` of them.
FetchPart FetchPlan::part(int layer, double before, double own) const {
  if (layer == int(model_.layers.size()) || model_.layers[layer].window) return {};
  double all = qkv_weights(model_.layers[layer]);
  if (layer) all += weights(model_.layers[layer - 1].o) + mlp_weights(model_.layers[layer - 1]);
  return {layer, before / all, (before + own) / all};
}

Ahead FetchPlan::share(const FetchPart& part, int item, int items, int chances) const {
  if (part.layer < 0 || pages_.empty()) return {};
  const int lines = int(layer_bytes_ / Ahead::kLine);
  const double all = double(pages_.size()) * lines, width = (part.end - part.begin) / items;
  const auto begin = ptrdiff_t(all * (part.begin + width * item));
  const auto end = std::min(ptrdiff_t(all), ptrdiff_t(all * (part.begin + width * (item + 1))));
  const int left = int(end - begin);
  if (left <= 0) return {};
  return {pages_.data() + begin / lines, layer_bytes_ * part.layer, lines, int(begin % lines), left,
          std::clamp((left + chances - 1) / chances, 1, kMaxPace)};
}

}  // namespace headwater
