"""The mypy plugin of ingress: `plugins = ["ingress.mypy"]`, see docs/typing.md.

Types without a plugin are in the annotations of `handle`, `declaration` and `batching`. The plugin
adds the types that annotations cannot express:

    hook              of                             gives
    class decorator   `@deployment`                  the decorated class the attributes of a
                                                     `Deployment`: mypy ignores the result of a
                                                     class decorator (python/mypy#3135)
    base class        a decorated class              an error, as at run time
    method signature  `Deployment.bind`              the parameters of the constructor; an
                                                     application may stand for a handle
    attribute         `Deployment.num_replicas`      the type of the option
    attribute         `DeploymentHandle.method`      a handle to the method of the class
    method            `handle.options`               the same, for a literal `method_name`; a stream
                                                     for a literal `stream=True`
    method signature  `DeploymentHandle.remote`      the method's parameters, a response that holds
                                                     its result; a response may stand for a value
    function, method  `@batch`, `@batch(...)`        parameters that are items, not lists

A handle is a `DeploymentHandle[X]`, where X is an instance of the class, or a callable: a function,
or one method. Only mypy imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mypy.checker import TypeChecker
from mypy.errorcodes import ATTR_DEFINED
from mypy.maptype import map_instance_to_supertype
from mypy.nodes import TypeInfo
from mypy.plugin import (
    AttributeContext,
    CheckerPluginInterface,
    ClassDefContext,
    FunctionContext,
    MethodContext,
    MethodSigContext,
    Plugin,
)
from mypy.type_visitor import TypeTranslator
from mypy.typeops import type_object_type
from mypy.types import (
    AnyType,
    CallableType,
    FunctionLike,
    Instance,
    LiteralType,
    Overloaded,
    Parameters,
    ParamSpecType,
    ProperType,
    Type,
    TypeAliasType,
    TypeOfAny,
    TypeType,
    UnionType,
    UnpackType,
    get_proper_type,
)

DECLARATION = "ingress.app.declaration.declaration"
DEPLOYMENT = f"{DECLARATION}.Deployment"
APPLICATION = f"{DECLARATION}.Application"
CONFIG = "ingress.config.DeploymentConfig"
HANDLE = "ingress.handle.DeploymentHandle"
STREAMING_HANDLE = "ingress.handle.StreamingHandle"
RESPONSE = "ingress.handle.DeploymentResponse"
RESPONSE_GENERATOR = "ingress.handle.DeploymentResponseGenerator"
BATCH = "ingress.app.batching.batching.batch"
BATCHED_TYPES = "ingress.app.batching.batching"
BATCHED = (f"{BATCHED_TYPES}.Batched", f"{BATCHED_TYPES}.BatchedStream")
GENERATORS = (
    *("typing.Generator", "typing.AsyncGenerator"),
    *("typing.Iterator", "typing.AsyncIterator"),
)


class IngressPlugin(Plugin):
    """The hooks, by the full name of what they are for."""

    # Not `get_class_decorator_hook_2`, which mypy calls after it has looked at subclasses.
    def get_class_decorator_hook(self, fullname: str) -> Callable[[ClassDefContext], None] | None:
        return _declare if fullname == f"{DECLARATION}.deployment" else None

    def get_base_class_hook(self, fullname: str) -> Callable[[ClassDefContext], None] | None:
        return _refuse_subclass if self._is_decorated(fullname) else None

    def get_method_signature_hook(
        self, fullname: str
    ) -> Callable[[MethodSigContext], FunctionLike] | None:
        if fullname == f"{HANDLE}.remote":
            return partial(_remote, streams=False)
        if fullname == f"{STREAMING_HANDLE}.remote":
            return partial(_remote, streams=True)
        owner, _, name = fullname.rpartition(".")
        is_bind = name == "bind" and (owner == DEPLOYMENT or self._is_decorated(owner))
        return _bind if is_bind else None

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        if fullname in (f"{HANDLE}.options", f"{STREAMING_HANDLE}.options"):
            return _options
        return _batch if fullname == f"{BATCHED_TYPES}.BatchDecorator.__call__" else None

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        return _batch if fullname == BATCH else None

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        owner, _, name = fullname.rpartition(".")
        if owner in (HANDLE, STREAMING_HANDLE):
            return partial(_method, name=name)
        return partial(_option, name=name) if owner == DEPLOYMENT else None

    def _is_decorated(self, fullname: str) -> bool:
        """Return whether that is a class under `@deployment`.

        A hook for any other class would take the place of the hooks of other plugins.
        """
        found = self.lookup_fully_qualified(fullname)
        info = None if found is None else found.node
        metaclass = info.metaclass_type if isinstance(info, TypeInfo) else None
        return metaclass is not None and metaclass.type.has_base(DEPLOYMENT)


def plugin(version: str) -> type[Plugin]:
    """Return the plugin class. mypy calls this function."""
    return IngressPlugin


def _declare(ctx: ClassDefContext) -> None:
    """Make `Deployment` the metaclass of the class, so that its class object has the attributes."""
    info = ctx.cls.info
    anything = AnyType(TypeOfAny.from_omitted_generics)
    itself = Instance(info, [anything] * len(info.defn.type_vars))
    metaclass = ctx.api.named_type_or_none(f"{DECLARATION}.DeploymentClass", [itself])
    if metaclass is not None:
        info.declared_metaclass = info.metaclass_type = metaclass


def _refuse_subclass(ctx: ClassDefContext) -> None:
    ctx.api.fail("The base class is a deployment; decorate a subclass of the class", ctx.reason)


def _bind(ctx: MethodSigContext) -> FunctionLike:
    """Return the signature of the constructor, with an `Application` as its result."""
    deployed = _deployed(ctx.type)
    if isinstance(deployed, FunctionLike):  # a function, which takes no arguments
        nothing: FunctionLike = ctx.default_signature.copy_modified([], [], [])
        return nothing
    if not isinstance(deployed, Instance):
        return ctx.default_signature
    constructor = get_proper_type(
        type_object_type(deployed.type, lambda name: ctx.api.named_generic_type(name, []))
    )
    if not isinstance(constructor, FunctionLike):
        return ctx.default_signature

    def bound(init: CallableType) -> CallableType:
        return init.copy_modified(
            arg_types=[_or_application(each, ctx.api) for each in init.arg_types],
            ret_type=_instance(ctx.api, APPLICATION, [init.ret_type]),
            fallback=ctx.default_signature.fallback,
            name=f"bind of {deployed.type.name}",
        )

    return _each(constructor, bound)


def _remote(ctx: MethodSigContext, streams: bool) -> FunctionLike:
    """Return the signature of the called method, with a response as its result."""
    target = _callable(_argument(ctx.type, HANDLE), ctx)
    if target is None:
        return ctx.default_signature

    def called(method: CallableType) -> CallableType:
        return method.copy_modified(
            arg_types=[_or_response(each, ctx.api) for each in method.arg_types],
            ret_type=_response(method.ret_type, streams, ctx),
        )

    return _each(target, called)


def _response(result: Type, streams: bool, ctx: MethodSigContext) -> Type:
    """Return the type of the response to a call that has this result."""
    value = get_proper_type(result)
    value = get_proper_type(_argument(value, "typing.Awaitable")) or value
    if isinstance(value, Instance) and value.type.fullname in GENERATORS:
        if streams:
            return _instance(ctx.api, RESPONSE_GENERATOR, [value.args[0]])
        ctx.api.fail(
            "The method returns a generator; call it with options(stream=True)", ctx.context
        )
    elif streams and not isinstance(value, AnyType):
        ctx.api.fail("options(stream=True) is for methods that return a generator", ctx.context)
    if streams or isinstance(value, AnyType):
        value = AnyType(TypeOfAny.special_form)
    return _instance(ctx.api, RESPONSE_GENERATOR if streams else RESPONSE, [value])


def _method(ctx: AttributeContext, name: str) -> Type:
    """Return the type of `handle.name`: a handle to the method of that name."""
    handle, deployed = get_proper_type(ctx.default_attr_type), _argument(ctx.type, HANDLE)
    is_own = isinstance(ctx.type, Instance) and ctx.type.type.get(name) is not None
    if is_own or name.startswith("_"):
        return handle
    if not isinstance(deployed, Instance) or not isinstance(handle, Instance):
        return handle
    return handle.copy_modified(args=[_member(deployed, name, ctx)])


def _options(ctx: MethodContext) -> Type:
    """Return the type of `handle.options(...)` for its `method_name` and `stream`."""
    deployed = _argument(ctx.type, HANDLE)
    if not isinstance(ctx.type, Instance) or deployed is None:
        return ctx.default_return_type
    name, stream = _given(ctx, "method_name"), _given(ctx, "stream")
    handle, target = ctx.type.type.fullname, deployed
    if isinstance(stream, LiteralType):
        handle = STREAMING_HANDLE if stream.value is True else HANDLE
    if isinstance(name, LiteralType) and isinstance(deployed, Instance):
        target = get_proper_type(_member(deployed, str(name.value), ctx))
    elif isinstance(name, Instance):
        target = AnyType(TypeOfAny.special_form)
    if isinstance(stream, Instance):  # either kind
        handle, target = HANDLE, AnyType(TypeOfAny.special_form)
    return _instance(ctx.api, handle, [target])


def _given(ctx: MethodContext, parameter: str) -> ProperType | None:
    """Return the type of an argument, a `LiteralType` if it is one, `None` if it is left out."""
    given = ctx.arg_types[ctx.callee_arg_names.index(parameter)]
    value = get_proper_type(given[0]) if given else None
    return value.last_known_value or value if isinstance(value, Instance) else value


def _option(ctx: AttributeContext, name: str) -> Type:
    """Return the type of `deployment.name`, an option unless `Deployment` has that attribute."""
    if _instance(ctx.api, DEPLOYMENT, []).type.get(name) is not None:
        return ctx.default_attr_type
    config = _instance(ctx.api, CONFIG, [])
    if config.type.get(name) is not None:
        return _member(config, name, ctx)
    ctx.api.fail(
        f'A deployment has no attribute or option "{name}"', ctx.context, code=ATTR_DEFINED
    )
    return AnyType(TypeOfAny.from_error)


def _batch(ctx: FunctionContext | MethodContext) -> Type:
    """Return the type of a batched function, whose parameters are items of the lists."""
    batched = get_proper_type(ctx.default_return_type)
    func = get_proper_type(ctx.arg_types[0][0]) if ctx.arg_types[0] else None
    if not isinstance(batched, Instance) or batched.type.fullname not in BATCHED:
        return batched
    if not isinstance(func, CallableType):
        return batched
    start = int(func.arg_names[:1] in (["self"], ["cls"]))  # as at run time
    parameters = Parameters(
        [
            _argument(get_proper_type(each), "typing.Iterable") or AnyType(TypeOfAny.special_form)
            for each in func.arg_types[start:]
        ],
        func.arg_kinds[start:],
        func.arg_names[start:],
    )
    return batched.copy_modified(args=[parameters, batched.args[1]])


def _deployed(owner: ProperType) -> ProperType | None:
    """Return the class or function of a deployment, or of a decorated class."""
    if isinstance(owner, FunctionLike) and owner.is_type_obj():
        return _argument(owner.fallback, DEPLOYMENT)
    if isinstance(owner, TypeType) and isinstance(owner.item, Instance):
        owner = owner.item.type.metaclass_type or owner
    return _argument(owner, DEPLOYMENT)


def _argument(instance: Type | None, base: str) -> ProperType | None:
    """Return the argument of a generic base class with one parameter, if the type has that base."""
    if isinstance(instance, Instance):
        for info in instance.type.mro:
            if info.fullname == base:
                return get_proper_type(map_instance_to_supertype(instance, info).args[0])
    return None


Access = AttributeContext | MethodContext | MethodSigContext


def _instance(api: CheckerPluginInterface, fullname: str, arguments: Sequence[Type]) -> Instance:
    """Return an instance of a class of ingress. `named_generic_type` misses modules in folders."""
    assert isinstance(api, TypeChecker)
    module, _, name = fullname.rpartition(".")
    info = api.modules[module].names[name].node
    assert isinstance(info, TypeInfo)
    return Instance(info, arguments)


def _member(owner: Instance, name: str, ctx: Access) -> Type:
    """Return the type of an attribute. Reports an error if there is none."""
    assert isinstance(ctx.api, TypeChecker)
    return ctx.api.expr_checker.analyze_external_member_access(name, owner, ctx.context)


def _callable(target: ProperType | None, ctx: Access) -> FunctionLike | None:
    """Return the signature of a callable, also that of an instance with `__call__`."""
    while isinstance(target, Instance):
        target = get_proper_type(_member(target, "__call__", ctx))
    return target if isinstance(target, FunctionLike) else None


def _each(target: FunctionLike, change: Callable[[CallableType], CallableType]) -> FunctionLike:
    """Return the signature with each of its overloads changed."""
    if isinstance(target, Overloaded):
        return Overloaded([change(each) for each in target.items])
    assert isinstance(target, CallableType)
    return change(target)


def _or_response(parameter: Type, api: CheckerPluginInterface) -> Type:
    """Return the parameter's type or a response with it: the router resolves it."""
    value = get_proper_type(parameter)
    if isinstance(value, AnyType | ParamSpecType | UnpackType):
        return parameter
    return UnionType.make_union([value, _instance(api, RESPONSE, [value])])


def _or_application(parameter: Type, api: CheckerPluginInterface) -> Type:
    """Return the parameter's type, or that type with applications in the places of handles."""
    replaced = parameter.accept(_HandleToApplication(api))
    return parameter if replaced == parameter else UnionType.make_union([parameter, replaced])


class _HandleToApplication(TypeTranslator):
    """Replaces `DeploymentHandle[X]` by `Application[X]`, also inside of lists and dicts."""

    def __init__(self, api: CheckerPluginInterface) -> None:
        super().__init__()
        self.api = api

    def visit_instance(self, t: Instance) -> Type:
        if t.type.fullname == HANDLE:
            return _instance(self.api, APPLICATION, t.args)
        return super().visit_instance(t)

    def visit_callable_type(self, t: CallableType) -> Type:
        return t

    def visit_type_alias_type(self, t: TypeAliasType) -> Type:
        return t if t.is_recursive else get_proper_type(t).accept(self)
