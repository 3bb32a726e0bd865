// Attention of a step: positions, the items of its plan, and the merge of what they computed.
#pragma once

#include <vector>

#include "attention_plan.h"
#include "step.h"

namespace headwater {

// Queries, keys and values of all tokens lie in Workspace::qkv, [tokens, qkv_stride].
class Attention {
 public:
  // The batch's tokens are the workspace's rows from `first_row` on.
  Attention(Backend& backend, const Model& model, const KVPool& kv, const Batch& batch,
            int first_row);

  // Reserves what it needs of the backend's workspace; no step runs.
  void reserve();

  // Once a step, for each token.
  void find_angles(int row);

  // Rotates the queries of tokens [first, end). A single token does without this and the next:
  // `attend` does it for its items.
  void turn_queries(int layer, int first, int end);

  // Rotates their keys, and writes them and their values to their slots.
  void write(int layer, int first, int end);

  // Item `number` of the plan.
  void attend(int layer, int number, int thread);

  // Merges a token's key blocks into its output where they were computed apart.
  void merge(int row, int thread, Inputs& out);

  // Of a token's query head, and then of its keys and values.
  float* query(int token, int head) const;
  float* output(Inputs& out, int token, int head) const;

  const AttentionPlan plan;
  const int qkv_stride;
  const int output_stride;

 private:
  void rotate(const float* x, const std::vector<float>& norm_weight, int row, float scale,
              float* out);
  void turn_query(const Layer& layer, int row, const float* q, float* out);
  void store(int index, int row, int rows, int kv_head);
  void store_half(const float* k, const float* v, int slot, uint16_t* head);
  void store_pairs(const float* k, const float* v, int rows, int slot, uint32_t* head);
  void store_codes(const float* k, const float* v, int slot, uint8_t* head);
  void turn(int index, const AttendItem& item, ThreadScratch& scratch);
  void attend_all(AttendBlock& work, const QueryTile& tile, ThreadScratch& scratch, int kv_head);

  void clear(float* state) const;
  float* partial(const TokenPartials& token, int head, int block) const;

  const Isa& isa_;
  const Model& model_;
  const Spec& spec_;
  const KVPool& kv_;
  const Batch& batch_;
  Workspace& ws_;
  const int first_row_;
  const int group_;
  const int partial_stride_;
};

}  // namespace headwater
