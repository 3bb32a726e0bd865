// Whether the numbers of a batch are within the contract.
#pragma once

#include "step.h"

namespace headwater {

// As kernels/contract.py's check_batch, which also says what is wrong; nothing outside the arrays'
// sizes is read, whatever they hold.
bool is_valid(const Batch& batch, const Spec& spec, const KVPool& kv);

// Whether all are of the vocabulary.
bool are_tokens(const int32_t* token_ids, int count, const Spec& spec);

}  // namespace headwater
