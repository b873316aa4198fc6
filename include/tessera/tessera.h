#pragma once

/// Everything that most training programs need. Each header can also be included alone. A program that needs one of the
/// following headers includes it in addition: backend.h, comm_hook.h, data_parallel.h, elementwise_optimizer.h,
/// matrix_optimizer.h, metrics_file.h, module_view.h, observe_pointers.h, rank_sampler.h, safetensors.h,
/// sync_batch_norm.h, sync_buffers.h.
#include "tessera/checkpoint.h"            // IWYU pragma: export
#include "tessera/collectives.h"           // IWYU pragma: export
#include "tessera/deferred_init.h"         // IWYU pragma: export
#include "tessera/durable.h"               // IWYU pragma: export
#include "tessera/engine.h"                // IWYU pragma: export
#include "tessera/error.h"                 // IWYU pragma: export
#include "tessera/init.h"                  // IWYU pragma: export
#include "tessera/mesh.h"                  // IWYU pragma: export
#include "tessera/recompute.h"             // IWYU pragma: export
#include "tessera/reduce_lr_on_plateau.h"  // IWYU pragma: export
#include "tessera/run.h"                   // IWYU pragma: export
#include "tessera/scaling.h"               // IWYU pragma: export
#include "tessera/seed_for_rank.h"         // IWYU pragma: export
#include "tessera/strategy.h"              // IWYU pragma: export
#include "tessera/token_batches.h"         // IWYU pragma: export
#include "tessera/trace.h"                 // IWYU pragma: export
#include "tessera/uneven.h"                // IWYU pragma: export
#include "tessera/upload.h"                // IWYU pragma: export
#include "tessera/weights.h"               // IWYU pragma: export
