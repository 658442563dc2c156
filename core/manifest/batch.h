// batch.h - the batch rule: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * world.
//
// Any two of the three give the third; one alone is completed with gradient_accumulation_steps = 1, except
// gradient_accumulation_steps itself. A remainder is an error with all four numbers, where each came from, and the
// nearest totals that would do. Nothing is ever rounded, and no derived value is 0.
#pragma once

#include "core/manifest/settings.h"
#include "core/status.h"

namespace strata {

// Fills the three batch keys of `settings` for this world size, or leaves them as they are and says what is wrong.
Status resolve_batch(int64_t world, Settings* settings);

}  // namespace strata
