"""Columns of FreeSurfer tables, named as FreeSurfer names them, and constants of anatomy that scale them.

With constants, no site has to reveal its own statistics:

* thickness in mm (columns ending in ``_thickness``): ``(t - 2.5) / 0.5``; the human cortex is 1 to 4.5 mm thick, 2.5 mm
  on average (Fischl and Dale 2000, PNAS 97:11050);
* intracranial volume (column ``ICV``): ``(litres - 1.5) / 0.2``;
* volume in mm3 (every other number): ``(ln(per mille of ICV) - 1) / 2``.
"""

from dataclasses import replace

import numpy as np

from ...core.errors import DataError
from .features import Features

DESIKAN_REGIONS = """
MeanThickness bankssts caudalanteriorcingulate caudalmiddlefrontal cuneus entorhinal frontalpole fusiform
inferiorparietal inferiortemporal insula isthmuscingulate lateraloccipital lateralorbitofrontal lingual
medialorbitofrontal middletemporal paracentral parahippocampal parsopercularis parsorbitalis parstriangularis
pericalcarine postcentral posteriorcingulate precentral precuneus rostralanteriorcingulate rostralmiddlefrontal
superiorfrontal superiorparietal superiortemporal supramarginal temporalpole transversetemporal
"""
"""Cortical regions of Desikan et al. 2006, NeuroImage 31:968, with the mean of a hemisphere."""

DESTRIEUX_REGIONS = """
G_Ins_lg_and_S_cent_ins G_and_S_cingul-Ant G_and_S_cingul-Mid-Ant G_and_S_cingul-Mid-Post G_and_S_frontomargin
G_and_S_occipital_inf G_and_S_paracentral G_and_S_subcentral G_and_S_transv_frontopol G_cingul-Post-dorsal
G_cingul-Post-ventral G_cuneus G_front_inf-Opercular G_front_inf-Orbital G_front_inf-Triangul G_front_middle
G_front_sup G_insular_short G_oc-temp_lat-fusifor G_oc-temp_med-Lingual G_oc-temp_med-Parahip G_occipital_middle
G_occipital_sup G_orbital G_pariet_inf-Angular G_pariet_inf-Supramar G_parietal_sup G_postcentral G_precentral
G_precuneus G_rectus G_subcallosal G_temp_sup-G_T_transv G_temp_sup-Lateral G_temp_sup-Plan_polar
G_temp_sup-Plan_tempo G_temporal_inf G_temporal_middle Lat_Fis-ant-Horizont Lat_Fis-ant-Vertical Lat_Fis-post
MeanThickness Pole_occipital Pole_temporal S_calcarine S_central S_cingul-Marginalis S_circular_insula_ant
S_circular_insula_inf S_circular_insula_sup S_collat_transv_ant S_collat_transv_post S_front_inf S_front_middle
S_front_sup S_interm_prim-Jensen S_intrapariet_and_P_trans S_oc-temp_lat S_oc-temp_med_and_Lingual
S_oc_middle_and_Lunatus S_oc_sup_and_transversal S_occipital_ant S_orbital-H_Shaped S_orbital_lateral
S_orbital_med-olfact S_parieto_occipital S_pericallosal S_postcentral S_precentral-inf-part S_precentral-sup-part
S_suborbital S_subparietal S_temporal_inf S_temporal_sup S_temporal_transverse
"""
"""Cortical regions of Destrieux et al. 2010, NeuroImage 53:1, with the mean of a hemisphere."""

VOLUMES = """
Left-Lateral-Ventricle Left-Inf-Lat-Vent Left-Cerebellum-White-Matter Left-Cerebellum-Cortex Left-Thalamus-Proper
Left-Caudate Left-Putamen Left-Pallidum 3rd-Ventricle 4th-Ventricle Brain-Stem Left-Hippocampus Left-Amygdala CSF
Left-Accumbens-area Left-VentralDC Left-choroid-plexus Right-Lateral-Ventricle Right-Inf-Lat-Vent
Right-Cerebellum-White-Matter Right-Cerebellum-Cortex Right-Thalamus-Proper Right-Caudate Right-Putamen
Right-Pallidum Right-Hippocampus Right-Amygdala Right-Accumbens-area Right-VentralDC Right-choroid-plexus
WM-hypointensities Optic-Chiasm CC_Posterior CC_Mid_Posterior CC_Central CC_Mid_Anterior CC_Anterior lhCortexVol
rhCortexVol SubCortGrayVol TotalGrayVol SupraTentorialVol
"""
"""Subcortical and global volumes."""


def _name_thickness(regions: str) -> list[str]:
    return [f"{side}_{region}_thickness" for side in ("lh", "rh") for region in regions.split()]


ATLASES: dict[str, tuple[str, ...]] = {
    "destrieux": tuple(sorted(["ICV", *VOLUMES.split(), *_name_thickness(DESTRIEUX_REGIONS)])),
    "desikan": tuple(sorted(["ICV", *_name_thickness(DESIKAN_REGIONS)])),
}
"""Feature columns by atlas, in name order, which is their order in the network's input."""


def scale_anatomically(features: Features) -> Features:
    """Return the features with numbers scaled by the constants in the module's docstring.

    Raises:
        DataError: an intracranial volume is not above 0.
    """
    litre, values = 1e6, features.values.copy()
    icv = features.values[:, features.names.index("ICV")] if "ICV" in features.names else np.array(np.nan)
    if len(rows := np.flatnonzero(icv <= 0)):
        raise DataError(f"column 'ICV' is {icv[rows[0]]:g} (row {rows[0] + 1}); expected volumes in mm3, above 0")
    for position in np.flatnonzero(features.numbers):
        name, column = features.names[position], features.values[:, position]
        if name.endswith("_thickness"):
            values[:, position] = (column - 2.5) / 0.5
        elif name == "ICV":
            values[:, position] = (column / litre - 1.5) / 0.2
        else:
            values[:, position] = (np.log(np.maximum(column, 1.0) / icv * 1000) - 1) / 2
    return replace(features, values=values)
