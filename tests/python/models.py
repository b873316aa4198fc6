"""Small models that together do what PyTorch programs do. Each class is a case of training_ranks.py."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, BATCH = 12, 5, 12


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """A module that computes a loss from a batch of shape [batch, WIDTH]. The base class of the cases below."""

    def __init__(self, blocks=3):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def body(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x, target):
        return functional.cross_entropy(self.head(self.body(x)), target)


class Frozen(Classifier):
    """Frozen parameters beside trainable parameters. Some modules have both kinds, and some modules are frozen
    whole."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.bias.requires_grad_(False)
        self.first.weight.requires_grad_(False)


class AllButOneFrozen(Classifier):
    """Fine-tunes only the head, so backward reaches no block."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


class Tied(Classifier):
    """Has one parameter under two names in two units, and a whole module under two names."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.again = self.blocks[1]

    def body(self, x):
        return self.again(super().body(x))


class Unused(Classifier):
    """Has a module that forward never uses. The module's parameters get no gradients, and do not change."""

    def __init__(self):
        super().__init__()
        self.spare = Block()


class Nested(Classifier):
    """A module that has units inside a unit."""

    def __init__(self):
        super().__init__()
        self.blocks[1].inner = nn.Sequential(Block(), Block())
        self.blocks[1].forward = lambda x, block=self.blocks[1]: block.inner(Block.forward(block, x))


class MixedDtypes(Classifier):
    """Frozen bf16 and integer parameters beside fp32 parameters that train."""

    def __init__(self):
        super().__init__()
        self.blocks[0] = self.blocks[0].to(torch.bfloat16).requires_grad_(False)
        self.shift = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def body(self, x):
        x = self.first(x)
        x = self.blocks[0](x.bfloat16()).float()
        return self.blocks[2](self.blocks[1](x)) + 0.01 * self.shift


class Checkpointed(Classifier):
    reentrant = False

    def body(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return 2 * x * weight * gradient, (x * x * gradient).sum(0)


class CustomFunction(Classifier):
    """A custom autograd.Function that takes a parameter and saves it for backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def body(self, x):
        return Square.apply(super().body(x), self.scale)


class Parametrized(Classifier):
    """Weights that are computed from parameters in forward."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.blocks[0].up)
        nn.utils.parametrizations.spectral_norm(self.blocks[1].up).eval()


class Functional(Classifier):
    """torch.func.functional_call with the module's own parameters, and with changed parameters."""

    def body(self, x):
        for block in self.blocks:
            changed = {name: 0.9 * value for name, value in block.named_parameters()}
            x = torch.func.functional_call(block, changed, (x,)) + torch.func.functional_call(block, dict(block.named_parameters()), (x,))
        return x


class Hooked(Classifier):
    """Has hooks on parameters and modules. The hooks change gradients and outputs, or record a gradient."""

    def __init__(self):
        super().__init__()
        self.blocks[0].up.weight.register_hook(lambda gradient: 0.5 * gradient)
        self.blocks[1].register_forward_hook(lambda module, inputs, output: 1.5 * output)
        self.blocks[2].register_full_backward_hook(lambda module, given, taken: tuple(0.7 * each for each in given))
        self.seen = []
        self.head.weight.register_post_accumulate_grad_hook(lambda parameter: self.seen.append(float(parameter.grad.sum())))


class Convolutions(nn.Module):
    """A network like those of torchvision, but without batch norms, since their statistics differ between ranks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x, target):
        x = self.stem(x.reshape(-1, 1, 3, 4))
        for block in self.blocks:
            x = x + block(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), target)


class Recurrent(nn.Module):
    """Modules that give their weights to one operator as a list."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 9, num_layers=2, batch_first=True)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x, target):
        return functional.cross_entropy(self.head(self.lstm(x.reshape(-1, 3, 4))[0][:, -1]), target)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x, target):
        x = torch.stack([x, x.roll(1, -1), x.square()], 1)  # tokens of a sequence differ, so attention has gradients
        return functional.cross_entropy(self.head(self.encoder(x).mean(1)), target)


class Containers(nn.Module):
    """Has a ParameterList, a ParameterDict, and parameters of the root."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(3))
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(WIDTH)), "shift": nn.Parameter(torch.zeros(()))})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, target):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return functional.cross_entropy(self.head(x * self.named["scale"] + self.named["shift"]), target)


UNITS = {Convolutions: ["Sequential"], Recurrent: ["LSTM"], Transformer: ["TransformerEncoderLayer"], Containers: ["ParameterList"]}
MODELS = [Classifier, Frozen, AllButOneFrozen, Tied, Unused, Nested, MixedDtypes, Checkpointed, CheckpointedReentrant, CustomFunction,
          Parametrized, Functional, Hooked, *UNITS]


def units_of(kind):
    return {"classes": UNITS.get(kind, ["Block"])}
