// A decoder's packed weights.
#pragma once

#include <vector>

#include "layout.h"
#include "memory.h"
#include "pool.h"

namespace headwater {

// The C ABI's description of a weight; `data` is null where the model has no such weight.
struct SourceWeight {
  int32_t type;
  int32_t rows;
  int32_t cols;
  int32_t reserved;
  const uint8_t* data;
};

// The C ABI's description of a decoder (kernels/contract.py, DecoderSpec).
struct Spec {
  int32_t num_layers;
  int32_t hidden_size;
  int32_t intermediate_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t vocab_size;
  int32_t num_rope;
  float norm_eps;
  float rope_scale;
  const double* rope_inv_freq;      // [num_rope]
  const int32_t* sliding_window;    // [num_layers], 0: all keys
};

constexpr int kModelWeights = 3;   // embedding, final_norm, head
constexpr int kLayerWeights = 15;  // in the order of contract.LayerWeights

struct Layer {
  Matrix q, k, v, o, gate, up, down;
  std::vector<float> attn_norm, mlp_norm, q_norm, k_norm;  // empty: none
  std::vector<float> q_bias, k_bias, v_bias, o_bias;
  int window = 0;
};

struct Model {
  // `sources`: kModelWeights, then kLayerWeights for each layer. They are read, not kept.
  Model(Pool& pool, const Spec& spec, const SourceWeight* sources);

  Spec spec;  // its pointers are null
  std::vector<double> rope_inv_freq;
  Matrix embedding, head;
  std::vector<float> final_norm;
  std::vector<Layer> layers;
  Mapping arena;
};

}  // namespace headwater
