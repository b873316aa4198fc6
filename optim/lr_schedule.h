#pragma once

#include <cstdint>

#include "optim/arithmetic/scaled_lr.h"
#include "tessera/strategy.h"

namespace tessera {

/// Returns the learning rate of update number `step`, counted from 0. `base_lr` is the strategy's optimizer.lr;
/// `global_batch` is the number of samples in the update, over all ranks and microbatches.
///
/// The peak is base_lr. If base_batch_size is above 0, the peak is base_lr times the ratio global_batch /
/// base_batch_size (linear scaling rule, Goyal et al., arXiv 1706.02677, section 2.1), or times the square root of the
/// ratio (BatchScaling::kSquareRoot; Krizhevsky, arXiv 1404.5997, section 5). Let w be warmup_steps. The rate rises
/// linearly in the first w updates, as peak * (step + 1) / (w + 1). No rate of this rise is zero, and update w is the
/// first with the peak rate (arXiv 1706.02677, section 2.2). If f = warmup_from is above 0, the rate rises from peak *
/// f instead, as peak * (f + (1 - f) * step / w). The formulas below give the rate after the rise. They use r =
/// min_ratio, and x = (step - w) / (total_steps - w), which is at most 1:
///
///   constant      peak
///   manual        base_lr, always
///   linear        peak * (1 - (1 - r) * x)
///   cosine        peak * (r + (1 - r) * (1 + cos(pi x)) / 2)       Loshchilov and Hutter, arXiv 1608.03983, eq. 5
///   inverse_sqrt  peak * max(r, sqrt((w + 1) / (step + 1)))         Vaswani et al., arXiv 1706.03762, eq. 3
///   wsd           peak until total_steps - decay_steps, then linearly to peak * r   Hu et al., arXiv 2404.06395, 4.2
///   one_cycle     a cosine from peak * initial_ratio up to the peak, then a cosine down to peak * r at the last
///                 update (Smith and Topin, arXiv 1708.07120; two phases). The rise of one_cycle is its warm-up: it
///                 ends at update warmup_share * total_steps - 1, or at update warmup_steps if that is given.
///
/// After total_steps, the rate of linear, cosine, wsd and one_cycle stays at its last value.
///
/// If warmup_samples or warmup_epochs is given, w is 0 in these formulas. The result is multiplied by a factor that
/// rises with `seen`, the samples of all ranks in the updates before this one (warm_up_ratio). Goyal et al. use 5
/// epochs.
double lr_at(const LrScheduleConfig& config, double base_lr, std::int64_t step, std::int64_t global_batch,
             std::int64_t seen = 0);

/// Returns the rule by which a larger batch changes the peak.
BatchScale batch_scale(const LrScheduleConfig& config);

/// Returns the number of samples over which the rate rises (from warmup_samples or warmup_epochs), and the rate at
/// which the rise begins.
SampleWarmUp sample_warm_up(const LrScheduleConfig& config);

/// Returns the schedule's factor lr_at / peak, which is the same for any peak. The factor warm_up_ratio is not
/// included.
double lr_ratio_at(const LrScheduleConfig& config, std::int64_t step);

}  // namespace tessera
