// Repacking of checkpoint weights into tiles of 16 output rows.
#include "model.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "convert.h"

namespace headwater {
namespace {

constexpr int kTilesPerItem = 16;

// One row of one tile; `lane` is the row's place in it.
void pack_row(const Matrix& m, const uint8_t* in, int lane, uint8_t* tile) {
  const int unit_bytes = m.unit_bytes();
  if (!m.quantised()) {
    const int size = unit_bytes / kTileRows;
    for (int c = 0; c < m.cols; ++c)
      std::memcpy(tile + size_t(c) * unit_bytes + lane * size, in + size_t(c) * size, size);
    return;
  }
  const int scales = m.type == WeightType::kQ4_1 ? 2 : 1;
  for (int b = 0; b < m.units(); ++b, tile += unit_bytes) {
    for (int i = 0; i < scales; ++i, in += 2) std::memcpy(tile + 32 * i + 2 * lane, in, 2);
    uint8_t* quants = tile + 32 * scales;
    if (m.type == WeightType::kQ8_0) {
      for (int pair = 0; pair < 16; ++pair, in += 2)
        std::memcpy(quants + 32 * pair + 2 * lane, in, 2);
    } else {
      for (int g = 0; g < 4; ++g, in += 4) std::memcpy(quants + 64 * g + 4 * lane, in, 4);
    }
  }
}

void pack_tiles(const Matrix& m, const SourceWeight& source, int first, int last, uint8_t* out) {
  const WeightType type = WeightType(source.type);
  const size_t row_bytes = source_row_bytes(type, m.cols);
  std::vector<uint8_t> converted(type == m.type ? 0 : source_row_bytes(m.type, m.cols));
  for (int t = first; t < last; ++t)
    for (int lane = 0; lane < std::min(kTileRows, m.rows - t * kTileRows); ++lane) {
      const uint8_t* row = source.data + row_bytes * (size_t(t) * kTileRows + lane);
      if (!converted.empty()) {
        convert_row(type, row, m.cols, converted.data());
        row = converted.data();
      }
      pack_row(m, row, lane, out + m.tile_bytes() * t);
    }
}

// A vector as floats, padded with zeros to a multiple of 32; empty where there is none.
std::vector<float> floats(const SourceWeight& w) {
  if (!w.data) return {};
  std::vector<float> out(size_t(w.cols + kBlock - 1) / kBlock * kBlock, 0.0f);
  for (int i = 0; i < w.cols; ++i) {
    if (WeightType(w.type) == WeightType::kF32) {
      std::memcpy(&out[i], w.data + size_t(i) * 4, 4);
      continue;
    }
    uint16_t half;
    std::memcpy(&half, w.data + size_t(i) * 2, 2);
    const uint32_t bits = uint32_t(half) << 16;
    if (WeightType(w.type) == WeightType::kF16)
      out[i] = _cvtsh_ss(half);
    else
      std::memcpy(&out[i], &bits, 4);
  }
  return out;
}

struct Placement {
  Matrix* matrix;
  const SourceWeight* source;
  size_t offset;
};

// Some tiles of one matrix, which a thread packs.
struct Packing {
  Matrix matrix;
  SourceWeight source;
  int first;
  uint8_t* out;
};

}  // namespace

Model::Model(Pool& pool, const Spec& given, const SourceWeight* sources)
    : spec(given),
      rope_inv_freq(given.rope_inv_freq, given.rope_inv_freq + given.num_rope),
      final_norm(floats(sources[1])),
      layers(given.num_layers) {
  std::vector<Placement> placements;
  size_t bytes = 0;
  const auto place = [&](Matrix& m, const SourceWeight& w) {
    m = Matrix{packed_type(WeightType(w.type)), w.rows, w.cols, nullptr};
    placements.push_back({&m, &w, bytes});
    bytes += (m.tile_bytes() * m.tiles() + 63) / 64 * 64;
  };
  place(embedding, sources[0]);
  const SourceWeight* w = sources + kModelWeights;
  for (int i = 0; i < given.num_layers; ++i, w += kLayerWeights) {
    Layer& layer = layers[i];
    layer.window = given.sliding_window[i];
    layer.attn_norm = floats(w[0]);
    place(layer.q, w[1]);
    place(layer.k, w[2]);
    place(layer.v, w[3]);
    place(layer.o, w[4]);
    layer.mlp_norm = floats(w[5]);
    place(layer.gate, w[6]);
    place(layer.up, w[7]);
    place(layer.down, w[8]);
    std::vector<float>* const optional[] = {&layer.q_bias, &layer.k_bias, &layer.v_bias,
                                            &layer.o_bias, &layer.q_norm, &layer.k_norm};
    for (int j = 0; j < 6; ++j) *optional[j] = floats(w[9 + j]);
  }
  if (sources[2].data) place(head, sources[2]);

  arena = Mapping(bytes, true);
  std::vector<Packing> packings;
  for (const Placement& p : placements) {
    uint8_t* out = arena.data() + p.offset;
    p.matrix->data = out;
    for (int first = 0; first < p.matrix->tiles(); first += kTilesPerItem)
      packings.push_back({*p.matrix, *p.source, first, out});
  }
  const auto region = std::make_shared<Region>(pool.threads());
  // One phase: with one for each matrix, a busy machine's scheduler is waited for at each.
  region->add({int(packings.size()), [&packings](int, int item, int) {
                 const Packing& p = packings[item];
                 const int end = std::min(p.matrix.tiles(), p.first + kTilesPerItem);
                 pack_tiles(p.matrix, p.source, p.first, end, p.out);
               }});
  pool.run(region);
  if (!sources[2].data) head = embedding;
  spec.rope_inv_freq = nullptr;
  spec.sliding_window = nullptr;
}

}  // namespace headwater
