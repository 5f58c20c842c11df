"""What editors and type checkers know of the package: a test compares it with what there is."""
from pathlib import Path
from typing import Any

from cssl.adamatch import AdaMatch as AdaMatch
from cssl.alphamatch import AlphaMatch as AlphaMatch
from cssl.c2s2l import C2S2L as C2S2L
from cssl.cli import main as main
from cssl.comatch import CoMatch as CoMatch
from cssl.crmatch import CRMatch as CRMatch
from cssl.cssl import CSSL as CSSL
from cssl.dash import Dash as Dash
from cssl.defixmatch import DeFixMatch as DeFixMatch
from cssl.enaet import EnAET as EnAET
from cssl.fixmatch import FixMatch as FixMatch
from cssl.fixmatch_da import FixMatchDA as FixMatchDA
from cssl.flexmatch import FlexMatch as FlexMatch
from cssl.freematch import FreeMatch as FreeMatch
from cssl.fully_supervised import FullySupervised as FullySupervised
from cssl.fully_supervised_mixup import FullySupervisedMixUp as FullySupervisedMixUp
from cssl.ict import ICT as ICT
from cssl.lsmatch import LSMatch as LSMatch
from cssl.mean_teacher import MeanTeacher as MeanTeacher
from cssl.meta_pseudo_labels import MetaPseudoLabels as MetaPseudoLabels
from cssl.mixmatch import MixMatch as MixMatch
from cssl.mixup import MixUp as MixUp
from cssl.pi_model import PiModel as PiModel
from cssl.pseudo_label import PseudoLabel as PseudoLabel
from cssl.refixmatch import ReFixMatch as ReFixMatch
from cssl.remixmatch import ReMixMatch as ReMixMatch
from cssl.rerankmatch import ReRankMatch as ReRankMatch
from cssl.simmatch import SimMatch as SimMatch
from cssl.softmatch import SoftMatch as SoftMatch
from cssl.supervised import Supervised as Supervised
from cssl.uda import UDA as UDA
from cssl.upsmatch import UPSMatch as UPSMatch
from cssl.vat import VAT as VAT
from libml import augment as augment
from libml.config import RunConfig as RunConfig
from libml.config import option as option
from libml.data import SSLData
from libml.data import from_arrays as from_arrays
from libml.data import from_csv as from_csv
from libml.data import from_folder as from_folder
from libml.data import load as load
from libml.errors import UserError as UserError
from libml.experiment import train as train
from libml.features import from_features as from_features
from libml.learn import losses as losses
from libml.learn.model import SSLModel as SSLModel
from libml.networks.custom import Builder
from libml.results import metrics as metrics
from libml.results.predict import Classifier
from libml.run import Run as Run

__version__: str

def methods() -> dict[str, str]: ...
def method(name: str) -> type[SSLModel]: ...
def open(path: str | Path, *, data: SSLData | None = ..., data_dir: str = ...,
         method_class: type[SSLModel] | None = ..., network: Builder | None = ...) -> Run: ...
def open_export(folder: str | Path) -> Classifier: ...
def load_model(path: str | Path, **arguments: Any) -> SSLModel: ...
