// Tests how gradients are copied or added into a unit's bucket, and for which gradients the packer waits.

#include "sharding/reduce/pack/gradient_packer.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "hand_made_units.h"
#include "runtime/comm/shared/run_ranks.h"
#include "sharding/memory_view.h"

namespace tessera::testing {
namespace {

/// A unit of three parameters, and a bucket of `dtype`. The bucket is full of numbers that must be overwritten.
struct Packed {
  Packed(const Mesh& mesh, DType dtype, ComputeDevice device = {})
      : units(mesh, {.sizes = {{{7, 11}, {300}, {5}}}}),
        group(units.group(0)),
        dtype(dtype),
        bucket(at::full({group.layout.numel()}, NAN, at::TensorOptions(scalar_type_of(dtype)))),
        packer(units.unit(0), dtype, device, copies) {
    packer.begin();
  }
  std::byte* memory() { return static_cast<std::byte*>(bucket.data_ptr()); }
  void take(std::size_t i, const at::Tensor& gradient) { packer.take(group, i, gradient, memory(), true); }
  void fill() {
    copies.flush();
    packer.fill_missing(group, memory(), false);
  }
  at::Tensor part(std::size_t i) const {
    const FlatParameter& parameter = group.parameters[i];
    return bucket.as_strided(parameter.sizes, parameter.strides, group.layout.extent(i).offset);
  }
  at::Tensor gradient(std::size_t i, float scale = 1.0f) const {
    return HandMadeUnits::values_of(0, i, group.parameters[i].sizes) * scale + 0.375f;
  }

  HandMadeUnits units;
  FlatGroup& group;
  const DType dtype;
  at::Tensor bucket;
  PendingCopies copies;
  GradientPacker packer;
};

void alone(const std::function<void(const Mesh&)>& body) { run_ranks({.ranks = 1}, body); }

TEST(GradientPacker, PutsEachGradientInItsPlaceAndZerosElsewhere) {
  alone([](const Mesh& mesh) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      Packed packed(mesh, dtype);
      EXPECT_EQ(packed.packer.trainable(), 3);
      std::int64_t used = 0;
      for (const std::size_t i : {2u, 0u, 1u}) {
        EXPECT_FALSE(packed.packer.is_complete());
        packed.take(i, packed.gradient(i));
      }
      EXPECT_TRUE(packed.packer.is_complete());
      packed.fill();
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(at::equal(packed.part(i), packed.gradient(i).to(scalar_type_of(dtype))));
        used += packed.part(i).count_nonzero().item<std::int64_t>();
      }
      EXPECT_EQ(packed.bucket.count_nonzero().item<std::int64_t>(), used) << "gaps are zero";
    }
  });
}

TEST(GradientPacker, TakesAnyStridesAndDtypes) {
  alone([](const Mesh& mesh) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Packed packed(mesh, dtype);
      const at::Tensor turned = packed.gradient(0).t().contiguous().t();
      const at::Tensor every_other = at::stack({packed.gradient(1), at::zeros({300})}, 1).select(1, 0);
      const at::Tensor one_number = at::full({1}, 2.5f).expand({5});
      packed.take(0, turned);
      packed.take(1, every_other.to(at::kBFloat16));
      packed.take(2, one_number);
      packed.fill();
      EXPECT_TRUE(at::equal(packed.part(0), turned.to(scalar_type_of(dtype))));
      EXPECT_TRUE(at::equal(packed.part(1), every_other.to(at::kBFloat16).to(scalar_type_of(dtype))));
      EXPECT_TRUE(at::equal(packed.part(2), one_number.to(scalar_type_of(dtype))));
    }
  });
}

TEST(GradientPacker, GradientsOfAParameterThatComeTwiceAreAdded) {
  alone([](const Mesh& mesh) {
    Packed packed(mesh, DType::kF32);
    packed.take(1, packed.gradient(1));
    packed.take(1, packed.gradient(1, 3.0f));
    EXPECT_FALSE(packed.packer.is_complete()) << "one parameter's";
    packed.fill();
    EXPECT_TRUE(at::equal(packed.part(1), packed.gradient(1) + packed.gradient(1, 3.0f)));
    EXPECT_EQ(packed.part(0).count_nonzero().item<std::int64_t>(), 0) << "it did not come";
  });
}

TEST(GradientPacker, UncountedGradientIsZeroAndMarksNoUse) {
  alone([](const Mesh& mesh) {
    Packed packed(mesh, DType::kBF16);
    for (const std::size_t i : {0u, 0u, 1u}) packed.packer.take_zeros(packed.group, i, packed.memory());
    EXPECT_FALSE(packed.packer.is_complete());
    packed.take(2, packed.gradient(2));
    EXPECT_TRUE(packed.packer.is_complete());
    packed.take(1, packed.gradient(1));
    packed.packer.take_zeros(packed.group, 2, packed.memory());
    packed.fill();
    EXPECT_EQ(packed.part(0).count_nonzero().item<std::int64_t>(), 0);
    for (const std::size_t i : {1u, 2u}) EXPECT_TRUE(at::equal(packed.part(i), packed.gradient(i).to(at::kBFloat16)));
    EXPECT_FALSE(packed.packer.used(packed.group, 0));
    EXPECT_TRUE(packed.packer.used(packed.group, 1));
  });
}

TEST(GradientPacker, BeginForgetsArrivalsAndResetForgetsUses) {
  alone([](const Mesh& mesh) {
    Packed packed(mesh, DType::kF32);
    packed.take(0, packed.gradient(0));
    EXPECT_TRUE(packed.packer.used(packed.group, 0));
    EXPECT_FALSE(packed.packer.used(packed.group, 1));
    packed.packer.begin();  // this begins another microbatch
    packed.take(1, packed.gradient(1));
    packed.fill();
    EXPECT_EQ(packed.part(0).count_nonzero().item<std::int64_t>(), 0);
    EXPECT_TRUE(packed.packer.used(packed.group, 0));
    EXPECT_TRUE(packed.packer.used(packed.group, 1));
    packed.packer.reset();
    EXPECT_FALSE(packed.packer.used(packed.group, 0));
    EXPECT_FALSE(packed.packer.used(packed.group, 1));
  });
}

/// Returns the sum of the squares of the bucket's elements.
double square_of(const at::Tensor& bucket) { return bucket.to(at::kDouble).square().sum().item<double>(); }

TEST(GradientPacker, SquaresAreOfWhatLiesInTheBucketWhichStaysTheSame) {
  alone([](const Mesh& mesh) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      Packed plain(mesh, dtype), squared(mesh, dtype);
      squared.packer.keep_squares();
      squared.packer.squares(true);
      const at::Tensor rows = at::tensor({1, 4, 1}, at::kLong);
      const at::Tensor sparse = at::sparse_coo_tensor(rows.unsqueeze(0), at::tensor({1.5f, 2.0f, 0.25f}), {5});
      for (Packed* packed : {&plain, &squared}) {
        packed->take(0, packed->gradient(0).t().contiguous().t());                        // its strides differ
        packed->take(1, packed->gradient(1).to(scalar_type_of(dtype)));                   // the bucket's dtype
        packed->take(2, sparse);                                                          // some rows occur twice
        for (const std::size_t i : {0u, 1u}) packed->take(i, packed->gradient(i, 3.0f));  // added to gradients 0 and 1
        packed->take(1, packed->gradient(1).to(at::kBFloat16));
        packed->packer.take_zeros(packed->group, 2, packed->memory());  // this changes nothing
        packed->fill();
      }
      EXPECT_TRUE(at::equal(plain.bucket, squared.bucket)) << name_of(dtype);
      const double wanted = square_of(squared.bucket);
      EXPECT_NEAR(squared.packer.square(), wanted, 1e-12 * wanted) << name_of(dtype);
      EXPECT_EQ(plain.packer.square(), 0) << "not kept";
      squared.packer.begin();
      EXPECT_EQ(squared.packer.square(), 0) << "an empty bucket";
      squared.packer.squares(false);
      squared.take(1, squared.gradient(1));
      EXPECT_EQ(squared.packer.square(), 0) << "switched off";
    }
  });
}

// One thread or two threads copy the gradient, in several pieces.
TEST(GradientPacker, LargeGradientIsSquaredPieceByPiece) {
  for (const int threads : {1, 2}) {
    alone([&](const Mesh& mesh) {
      at::set_num_threads(threads);
      HandMadeUnits units(mesh, {.sizes = {{{3, 70001}}}});
      FlatGroup& group = units.group(0);
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        at::Tensor bucket = at::zeros({group.layout.numel()}, at::TensorOptions(scalar_type_of(dtype)));
        PendingCopies copies;
        GradientPacker packer(units.unit(0), dtype, {}, copies);
        packer.keep_squares();
        packer.squares(true);
        packer.begin();
        const at::Tensor gradient = HandMadeUnits::values_of(0, 0, {3, 70001});
        auto* const memory = static_cast<std::byte*>(bucket.data_ptr());
        packer.take(group, 0, gradient, memory, true);
        packer.take(group, 0, gradient * 2, memory, true);
        const at::Tensor wanted = gradient.to(scalar_type_of(dtype)).add_(gradient * 2);
        EXPECT_TRUE(at::equal(bucket.narrow(0, group.layout.extent(0).offset, 210003).view({3, 70001}), wanted));
        const double square = square_of(wanted);
        EXPECT_NEAR(packer.square(), square, 1e-12 * square);
      }
    });
  }
}

TEST(GradientPacker, GapsKnownToBeZeroAreNotWritten) {
  alone([](const Mesh& mesh) {
    Packed packed(mesh, DType::kF32);
    for (std::size_t i = 0; i < 3; ++i) packed.take(i, packed.gradient(i));
    packed.packer.fill_missing(packed.group, packed.memory(), /*gaps_are_zero=*/true);
    const Extent gap = packed.group.layout.gaps()[0];
    EXPECT_TRUE(std::isnan(packed.bucket[gap.offset].item<float>())) << "it has not been touched";
  });
}

// ---- used sets ---------------------------------------------------------------------------------------------------

void expect_set(Packed& packed, const std::vector<char>& used) {
  packed.packer.expect(used);
  packed.packer.begin();
}

TEST(GradientPacker, OnlyExpectedGradientsAreWaitedFor) {
  alone([](const Mesh& mesh) {
    Packed packed(mesh, DType::kF32);
    expect_set(packed, {1, 0, 1});
    EXPECT_TRUE(packed.packer.expects_any());
    packed.take(2, packed.gradient(2));
    EXPECT_FALSE(packed.packer.is_complete());
    packed.take(0, packed.gradient(0));
    EXPECT_TRUE(packed.packer.is_complete());
    packed.fill();
    EXPECT_TRUE(at::equal(packed.part(0), packed.gradient(0)));
    EXPECT_EQ(packed.part(1).count_nonzero().item<std::int64_t>(), 0) << "not expected, so it is zero";
    EXPECT_TRUE(at::equal(packed.part(2), packed.gradient(2)));
    EXPECT_FALSE(packed.packer.used(packed.group, 1));
  });
}

TEST(GradientPacker, BucketIsCompleteAtOnceIfNothingIsExpected) {
  alone([](const Mesh& mesh) {
    Packed packed(mesh, DType::kF32);
    expect_set(packed, {0, 0, 0});
    EXPECT_FALSE(packed.packer.expects_any());
    EXPECT_TRUE(packed.packer.is_complete());
    EXPECT_EQ(packed.packer.trainable(), 3) << "they can train all the same";
    expect_set(packed, {0, 1, 0});
    EXPECT_TRUE(packed.packer.expects_any());
    EXPECT_FALSE(packed.packer.is_complete());
  });
}

TEST(GradientPacker, ExpectationHoldsFromTheNextBucketOn) {
  alone([](const Mesh& mesh) {
    Packed packed(mesh, DType::kF32);
    packed.packer.expect(std::vector<char>{0, 0, 0});
    EXPECT_FALSE(packed.packer.is_complete()) << "this bucket waits for all";
    packed.packer.begin();
    EXPECT_TRUE(packed.packer.is_complete());
  });
}

// Parameters that were unused together are usually also used together again.
TEST(GradientPacker, UnexpectedGradientMakesTheBucketWaitForAll) {
  alone([](const Mesh& mesh) {
    for (const std::vector<std::size_t>& order : {std::vector<std::size_t>{1, 0, 2}, {0, 1, 2}, {2, 1, 0}}) {
      Packed packed(mesh, DType::kF32);
      packed.packer.expect(std::vector<char>{1, 0, 0});
      for (int bucket = 0; bucket < 2; ++bucket) {  // the second bucket does not depend on the first
        packed.packer.begin();
        for (const std::size_t i : order) {
          packed.take(i, packed.gradient(i));
          const bool only_what_was_expected = i == 0 && order[0] == 0;
          EXPECT_EQ(packed.packer.is_complete(), i == order.back() || only_what_was_expected) << i;
        }
      }
    }
  });
}

TEST(GradientPacker, UnexpectedGradientThatComesTwiceCountsOnce) {
  alone([](const Mesh& mesh) {
    Packed packed(mesh, DType::kF32);
    expect_set(packed, {1, 0, 0});
    for (const std::size_t i : {1u, 1u, 1u, 0u}) packed.take(i, packed.gradient(i));
    EXPECT_FALSE(packed.packer.is_complete());
    packed.take(2, packed.gradient(2));
    EXPECT_TRUE(packed.packer.is_complete());
  });
}

// ---- copies that are started together ----------------------------------------------------------------------------

/// The CPU replaces a GPU. Operators count as queued, so copies may wait.
const ComputeDevice kQueued{c10::kCPU, /*is_queued=*/true, nullptr};

TEST(GradientPacker, CopiesOfAGpuWaitUntilTheyAreFlushed) {
  alone([](const Mesh& mesh) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Packed packed(mesh, dtype, kQueued);
      for (const at::ScalarType of_gradient : {at::kFloat, at::kBFloat16}) {
        packed.packer.begin();
        packed.bucket.fill_(NAN);
        for (std::size_t i = 0; i < 3; ++i) packed.take(i, packed.gradient(i).to(of_gradient));
        EXPECT_TRUE(packed.packer.is_complete());
        EXPECT_TRUE(packed.part(1).isnan().all().item<bool>());
        packed.fill();
        EXPECT_TRUE(packed.copies.empty());
        for (std::size_t i = 0; i < 3; ++i) {
          EXPECT_TRUE(at::equal(packed.part(i), packed.gradient(i).to(of_gradient).to(scalar_type_of(dtype))));
        }
      }
    }
  });
}

TEST(GradientPacker, GpuAddsASecondGradientToTheOneThatWaits) {
  alone([](const Mesh& mesh) {
    Packed packed(mesh, DType::kF32, kQueued);
    packed.take(0, packed.gradient(0));
    packed.take(0, packed.gradient(0, 2.0f));
    packed.fill();
    EXPECT_TRUE(at::equal(packed.part(0), packed.gradient(0) + packed.gradient(0, 2.0f)));
  });
}

TEST(PendingCopies, TensorsOfSeveralDtypesAreCopiedTogether) {
  const std::vector<at::Tensor> gradients = {at::arange(5.0f), at::arange(6.0f).to(at::kBFloat16), at::arange(7.0f)};
  std::vector<at::Tensor> places;
  PendingCopies copies;
  for (const at::Tensor& gradient : gradients) {
    places.push_back(at::zeros(gradient.sizes()));
    copies.add(places.back(), gradient);
  }
  copies.flush_if_many();
  EXPECT_FALSE(copies.empty()) << "three are not many";
  copies.flush();
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(places[i], gradients[i].to(at::kFloat)));
}

TEST(PendingCopies, ManyBytesAreFlushedAtOnce) {
  const at::Tensor large = at::ones({9 << 20});  // this gradient takes 36 MiB
  at::Tensor place = at::zeros_like(large);
  PendingCopies copies;
  copies.add(place, large);
  copies.flush_if_many();
  EXPECT_TRUE(copies.empty());
  EXPECT_TRUE(at::equal(place, large));
}

TEST(PendingCopies, DroppedCopiesWriteNothing) {
  at::Tensor place = at::zeros({4});
  PendingCopies copies;
  copies.add(place, at::ones({4}));
  copies.drop();
  copies.flush();
  EXPECT_EQ(place.count_nonzero().item<std::int64_t>(), 0);
}

// ---- sparse gradients --------------------------------------------------------------------------------------------

/// Returns a sparse gradient [7, 11] with the rows 5, 2, and again 5.
at::Tensor some_rows(float scale = 1.0f) {
  const at::Tensor values = (at::arange(33, at::kFloat) * 0.5f + scale).reshape({3, 11});
  return at::sparse_coo_tensor(at::tensor({5, 2, 5}, at::kLong).unsqueeze(0), values, {7, 11});
}

TEST(GradientPacker, AddsTheRowsOfASparseGradient) {
  alone([](const Mesh& mesh) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Packed packed(mesh, dtype);
      packed.take(0, some_rows());
      packed.fill();
      EXPECT_TRUE(at::equal(packed.part(0), some_rows().to_dense().to(scalar_type_of(dtype))));
      EXPECT_TRUE(packed.packer.used(packed.group, 0));
    }
  });
}

TEST(GradientPacker, AddsSparseAndDenseGradientsInAnyOrder) {
  alone([](const Mesh& mesh) {
    Packed packed(mesh, DType::kF32);
    const at::Tensor a = some_rows(), b = some_rows(4.0f), dense = packed.gradient(0);
    const auto sum_of = [&](const std::vector<at::Tensor>& gradients) {
      packed.packer.begin();
      for (const at::Tensor& gradient : gradients) packed.take(0, gradient);
      packed.fill();
      return packed.part(0).clone();
    };
    EXPECT_TRUE(at::equal(sum_of({a, b}), a.to_dense() + b.to_dense()));
    EXPECT_TRUE(at::equal(sum_of({dense, a}), dense + a.to_dense()));
    EXPECT_TRUE(at::equal(sum_of({a, dense}), dense + a.to_dense()));
    EXPECT_TRUE(at::equal(sum_of({a}), a.to_dense())) << "a new bucket begins at zero";
  });
}

}  // namespace
}  // namespace tessera::testing
