"""Reading one call: binding, places, sizes, which tensors follow the batch, what differs."""

import pytest
import torch

from graphcache.call import Binder, Call, Reading, differences
from graphcache.dims import DynamicDims
from graphcache.errors import Fallback
from graphcache.modes import Modes
from graphcache.reasons import Reason

CPU = torch.device("cpu")


def forward(x, mask=None, *rest, scale=1.0, **more):
    return x


def read(args, kwargs=None, shapes=None, follows=None, exact=False, target=forward, state=0):
    binder = Binder(target)
    dims = DynamicDims(shapes, binder.parameters, binder.open_ended)
    call = Call(binder, args, kwargs or {})
    return Reading(call, dims, follows or {}, Modes(CPU), exact, state)


X, M = torch.ones(3, 4), torch.zeros(3)


class TestBinding:
    def test_arguments_are_bound_to_forwards_parameters(self):
        """Positional, keyword, *args and **kwargs, in forward's order."""
        bound = Binder(forward).bind((1, 2, 3, 4), {"scale": 5, "other": 6})
        assert bound == {"x": 1, "mask": 2, "rest": (3, 4), "scale": 5, "other": 6}
        assert list(Binder(forward).bind((), {"mask": 2, "x": 1})) == ["x", "mask"]

    def test_arguments_that_do_not_bind_are_left_to_eager(self):
        """Eager raises the TypeError; here it is a fallback with its text."""
        with pytest.raises(Fallback, match="missing a required argument: 'x'") as caught:
            Binder(lambda x: x).bind((), {})
        assert caught.value.reason == Reason.UNSUPPORTED_INPUT

    def test_a_builtin_without_a_signature_binds_by_position(self):
        """torch functions have none."""
        binder = Binder(torch.add)
        assert binder.open_ended
        assert binder.bind((1, 2), {"alpha": 3}) == {"0": 1, "1": 2, "alpha": 3}

    def test_open_ended_means_keywords_of_any_name(self):
        """Only then may dynamic_shapes name what is no parameter."""
        assert Binder(forward).open_ended
        assert not Binder(lambda x: x).open_ended


class TestPlaces:
    def test_tensors_are_ordered_by_parameter_and_slots_tell_their_place(self):
        """A keyword call in another order."""
        call = Call(Binder(forward), (), {"mask": M, "x": X})
        assert [id(t) for t in call.leaves] == [id(M), id(X)]
        assert [id(t) for t in call.tensors] == [id(X), id(M)]
        assert call.slots == [1, 0]

    def test_one_tensor_passed_twice_has_two_places(self):
        """And stays one object in every run of this form of call."""
        call = Call(Binder(forward), (X, M), {"extra": [X]})
        assert call.slots == [0, 1, 2]
        assert call.repeats == (0, 1, 0)
        a, b, c = (torch.full((1,), float(i)) for i in range(3))
        args, kwargs = call.arguments_with([a, b, c])
        assert (args[0] is a, args[1] is b, kwargs["extra"][0] is a) == (True, True, True)

    def test_arguments_are_rebuilt_around_other_tensors(self):
        """Plain values, positions and keywords stay."""
        call = Call(Binder(forward), (), {"scale": 2.0, "mask": M, "x": X})
        a, b = torch.ones(1), torch.zeros(1)
        args, kwargs = call.arguments_with([a, b])
        assert args == ()
        assert list(kwargs) == ["scale", "mask", "x"]
        assert kwargs["x"] is a
        assert kwargs["mask"] is b
        assert kwargs["scale"] == 2.0

    def test_a_call_around_other_tensors_keeps_both_orders(self):
        """`leaves` as passed, `tensors` by parameter."""
        call = Call(Binder(forward), (), {"mask": M, "x": X})
        a, b = torch.ones(1), torch.zeros(1)
        other = call.around([a, b])
        assert [id(t) for t in other.tensors] == [id(a), id(b)]
        assert [id(t) for t in other.leaves] == [id(b), id(a)]
        assert [id(t) for t in call.tensors] == [id(X), id(M)]


class TestSizes:
    def test_the_batch_is_axis_0_of_the_first_tensor_that_has_one(self):
        """In forward's parameter order, scalars passed over."""
        reading = read((), {"mask": torch.ones(5, 2), "x": torch.tensor(1.0)})
        assert reading.sizes == (5,)
        assert reading.dims == ("batch",)
        assert reading.traffic == (5,)

    def test_tensors_of_equal_length_are_candidates_until_settled(self):
        """Unequal ones are static; settled ones are not asked again."""
        reading = read((X, M, torch.ones(7)))
        assert reading.candidates == ["mask"]
        assert [i.axes for i in reading.signature.inputs] == [((0, 0),), ((0, 0),), ()]
        apart = read((X, M), follows={"mask": False})
        assert apart.candidates == []
        assert [i.axes for i in apart.signature.inputs] == [((0, 0),), ()]
        assert apart.signature.inputs[1].shape == (3,)

    def test_a_call_without_a_tensor_of_one_dim_is_refused(self):
        """There is no batch."""
        with pytest.raises(Fallback, match="no tensor has all of the dims batch"):
            read((torch.tensor(1.0),))

    def test_named_dims_that_disagree_are_refused(self):
        """The text names the dim, both sizes and the tensor."""
        shapes = {"x": {0: "batch"}, "mask": {0: "batch"}}
        with pytest.raises(Fallback, match="dim batch is 3 elsewhere, 4 in mask") as caught:
            read((X, torch.ones(4)), shapes=shapes)
        assert caught.value.reason == Reason.UNSUPPORTED_INPUT

    def test_named_axes_that_a_tensor_lacks_are_refused(self):
        """The text names the tensor and its rank."""
        with pytest.raises(Fallback, match="names axes that x of rank 2 lacks"):
            read((X,), shapes={"x": {2: "batch"}})

    def test_negative_axes_count_from_the_end(self):
        """As everywhere in torch."""
        reading = read((X,), shapes={"x": {-1: "seq"}})
        assert reading.sizes == (4,)
        assert reading.signature.inputs[0].axes == ((1, 0),)

    def test_exact_sizes_without_named_dims_make_every_axis_a_dim(self):
        """The signature has no size left, and traffic records the rows."""
        reading = read((X, M), exact=True)
        assert reading.sizes == (3, 4, 3)
        assert reading.traffic == (3,)
        assert [i.shape for i in reading.signature.inputs] == [(None, None), (None,)]
        assert reading.resized((4, 4, 4)) is None

    def test_exact_sizes_with_named_dims_keep_those(self):
        """Other axes are part of the signature."""
        reading = read((X,), shapes={"x": {0: "batch"}}, exact=True)
        assert reading.sizes == (3,)
        assert reading.signature.inputs[0].shape == (None, 4)

    def test_a_call_is_resized_along_its_dynamic_axes_only(self):
        """Cut or repeated; what does not follow stays."""
        reading = read((X, M), follows={"mask": False})
        for n in (2, 7):
            tensors = reading.resized((n,)).tensors
            assert [tuple(t.shape) for t in tensors] == [(n, 4), (3,)]

    def test_a_tensor_on_another_accelerator_is_a_device_fallback(self):
        """The text names both devices."""
        with pytest.raises(Fallback, match="x is on meta, the module on cpu") as caught:
            read((X.to("meta"),))
        assert caught.value.reason == Reason.DEVICE

    def test_nothing_is_lifted_on_one_device(self):
        """CPU tensors for a CPU module are where it gets them."""
        assert not read((X,)).lifted


class TestDifferences:
    def lines(self, ours, theirs):
        return list(differences(ours.signature, theirs.signature))

    def test_equal_signatures_have_no_difference(self):
        """Sizes are not told."""
        assert self.lines(read((X,)), read((torch.ones(9, 4),))) == []

    @pytest.mark.parametrize(
        ("ours", "text"),
        [
            (lambda: read((X.double(),)), "x: dtype torch.float64, captured torch.float32"),
            (lambda: read((torch.ones(3, 5),)), "x: shape (None, 5), captured (None, 4)"),
            (lambda: read((X, M)), "mask: a tensor now, none captured"),
            (lambda: read((X,), {"scale": 2.0}), "scale: '2.0'"),
            (lambda: read((X,), state=1), "the module: training flags or attributes differ"),
        ],
    )
    def test_each_difference_is_a_line_that_names_it(self, ours, text):
        """What a user reads in explain()."""
        assert text in "\n".join(self.lines(ours(), read((X,))))

    def test_a_tensor_that_is_absent_now_is_named(self):
        """One captured, none now."""
        assert "mask: no tensor now, one captured" in self.lines(read((X,)), read((X, M)))

    def test_other_modes_are_told(self):
        """Autocast is one."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = read((X,))
        assert any(line.startswith("modes: ") for line in self.lines(ours, read((X,))))
